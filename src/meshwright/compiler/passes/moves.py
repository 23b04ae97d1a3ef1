"""Bringing a value into another sharding: one ``redistribute`` for all readers that can share it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from torch import fx

from meshwright.compiler.diagnostics import error
from meshwright.compiler.graph.calls import op_call
from meshwright.compiler.graph.program import annotation
from meshwright.compiler.graph.redistribute import redistribute
from meshwright.compiler.mesh import MICRO, Mesh, Sharding
from meshwright.compiler.mesh_paths import steps
from meshwright.compiler.passes.placement import Placed
from meshwright.compiler.passes.proposals import Priority
from meshwright.compiler.rules import rule_of

Meets = Callable[[fx.Node], bool]
"""Whether microbatches may meet at an op: run up to it one after another, and go on when all have come there."""


class Moves:
    """The redistributions of one graph.

    A moved copy is shared by the readers of one phase, so that activations gathered in forward are not kept
    for backward; a gathered weight by those of one block and phase. What has been paid is never paid again.
    """

    def __init__(self, graph: fx.Graph, mesh: Mesh, sequence: frozenset[str], meets: Meets | None = None) -> None:
        self.graph = graph
        self._mesh = mesh
        self._sequence = sequence
        self._meets = meets
        self._moved: dict[tuple[fx.Node, Sharding, str], Placed] = {}
        self._paid: dict[fx.Node, Placed] = {}

    def paid(self, placed: Placed) -> Placed:
        """The value, or the copy of it whose owed sums have been paid already."""
        return self._paid.get(placed.node, placed)

    def move(self, placed: Placed, target: Sharding, user: fx.Node, final: bool = False) -> Placed:
        """The value lying as ``target`` for ``user``; ``final``: it leaves the graph so.

        Raises E0305 when a value would have to be reduced or gathered over microbatches, where these must not meet.
        """
        source, target = placed.sharding.canonical(self._mesh), target.canonical(self._mesh)
        path = [s for s in steps(source, target, self._mesh) if s.kind != "resegment"]
        if not path:
            return placed
        pays = bool(source.owed - target.owed)
        where = "" if pays else _shared_by(user, storage=Priority.STORAGE in placed.priority.values())
        key = (placed.node, target, where)
        if key in self._moved:
            return self._moved[key]
        if any(MICRO in s.axes and s.kind not in ("shard", "owe") for s in path) and not self._may_meet(user):
            raise _coupled(placed.node, user)
        made = self.graph.call_function(redistribute, (placed.node, str(source), str(target)))
        note, reader = annotation(placed.node), annotation(user)
        made.meta["val"] = placed.node.meta.get("val")
        # a sum is paid by the block that owes it, a weight gathered by the one that needs it: so every block does alike
        block = note.block if pays and placed.node.op != "placeholder" else reader.block
        made.meta["meshwright"] = replace(note, sharding=target, phase=reader.phase, block=block)
        if final:
            # at once, so that a gradient is cut as soon as it is there and the whole one is freed
            placed.node.append(made)
        moved = Placed(made, target, self._priority(placed.priority, target), weight=placed.weight and not final)
        self._moved[key] = moved
        if pays and not target.owed and not final:
            self._paid[placed.node] = moved
        return moved

    def _may_meet(self, user: fx.Node) -> bool:
        return self._meets is not None and self._meets(user)

    def _priority(self, before: Mapping[str, Priority], target: Sharding) -> dict[str, Priority]:
        return {a: before.get(a, Priority.SOFT if a in self._sequence else Priority.HARD) for a in target.axes}


def _shared_by(user: fx.Node, storage: bool) -> str:
    note = annotation(user)
    return f"{note.phase} {note.block or note.origin.module}" if storage else note.phase


def _coupled(node: fx.Node, user: fx.Node) -> Exception:
    target: Any = user.target
    name = getattr(target, "overloadpacket", getattr(target, "__name__", target))
    call = op_call(user)
    if call is not None and rule_of(call) is None:
        return error(
            "E0305",
            f"{name} has no rule, so it runs on whole operands, and the step cannot be cut into microbatches",
            annotation(user).origin,
            "use microbatches = 1, declare separability = global, or write a rule for it (docs/add-an-op.md)",
        )
    return error(
        "E0305",
        f"{name} needs the whole batch at once, so the step cannot be cut into microbatches",
        annotation(user).origin,
        "use microbatches = 1, or declare what it means in microbatches: separability = global (docs/separability.md)",
        (f"the value {node.name} couples samples of different microbatches",),
    )
