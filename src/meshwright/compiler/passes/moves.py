"""Bringing a value into another sharding: one ``redistribute`` for all readers that can share it.

Where a plan declares that each group of the batch (a microbatch, or a rank's part of one) stands for the whole,
nothing is reduced over the groups: a group's sum, times their number, is taken for the sum over the batch. Such a value
differs from group to group, and what is made of it counts as its mean over the groups. Gradients obey the same rule,
since multiplying by the number of groups is its own transpose.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from meshwright.compiler.diagnostics import error
from meshwright.compiler.graph.calls import op_call
from meshwright.compiler.graph.program import annotation
from meshwright.compiler.graph.redistribute import redistribute
from meshwright.compiler.mesh import MICRO, Mesh, Sharding
from meshwright.compiler.mesh_paths import Step, steps
from meshwright.compiler.passes.declared import NOTHING, Meanings
from meshwright.compiler.passes.placement import Placed
from meshwright.compiler.passes.proposals import Priority
from meshwright.compiler.passes.told_apart import ToldApart
from meshwright.compiler.rules import rule_of
from meshwright.compiler.rules.rule import Rule


class Moves:
    """The redistributions of one graph.

    A moved copy is shared by the readers of one phase, so that activations gathered in forward are not kept
    for backward; a gathered weight by those of one block and phase. What has been paid is never paid again.
    """

    def __init__(self, graph: fx.Graph, mesh: Mesh, sequence: frozenset[str], meanings: Meanings = NOTHING) -> None:
        self.graph = graph
        self._mesh = mesh
        self._sequence = sequence
        self._meanings = meanings
        self._apart = ToldApart(meanings)
        self._varies: dict[fx.Node, frozenset[str]] = {}
        """By value: the axes over which groups have different ones, though it is neither cut nor owed there."""
        self._moved: dict[tuple[fx.Node, Sharding, str], Placed] = {}
        self._paid: dict[tuple[fx.Node, frozenset[str]], Placed] = {}

    def paid(self, placed: Placed, user: fx.Node) -> Placed:
        """The value, or the copy of it whose owed sums have been paid already as ``user`` means them."""
        return (
            self._paid.get((placed.node, self._groups(placed.node, user)), placed) if placed.sharding.owed else placed
        )

    def _groups(self, node: fx.Node, user: fx.Node) -> frozenset[str]:
        """The axes that cut the batch into groups each of which stands for the whole batch, for a reader of a value."""
        meaning = self._apart.meaning(node, user)
        return frozenset(a for a in self._meanings.groups(meaning) if a in self._mesh.names and self._mesh.size(a) > 1)

    def derive(self, made: fx.Node, sources: Iterable[fx.Node], results: Sequence[Sharding | None]) -> None:
        """Note over which axes what is made of ``sources`` differs from group to group."""
        varies = frozenset(axis for source in sources for axis in self._varies.get(source, ()))
        if varies:
            known = [{*s.axes, *s.owed} for s in results if s is not None]
            self._varies[made] = varies - frozenset.intersection(*map(frozenset, known))
        self._apart.derive(made, sources, results, bool(self._varies.get(made)))

    def unmixed(self, operands: list[Placed], rule: Rule, user: fx.Node) -> list[Placed]:
        """The operands of a call, those paid that owe sums over axes along which another one differs from group to
        group, unless the op adds the two up: it matters then whether a sum is that of the group or of the batch."""
        if not self._meanings.mixed:
            return operands
        made = []
        for number, placed in enumerate(operands):
            partners = {i for group in rule.linear if number in group for i in group}
            others = (p.node for i, p in enumerate(operands) if i not in partners)
            differ = {axis for other in others for axis in self._varies.get(other, ())}
            kept = frozenset(part for part in placed.sharding.partial if part[0] not in differ)
            found = placed
            if number not in rule.unread and kept != placed.sharding.partial:
                found = self.move(placed, Sharding(placed.sharding.dims, kept), user)
            made.append(found)
        return made

    def mean_of_groups(self, placed: Placed) -> Placed:
        """A value that leaves the graph: of one that differs from group to group, the mean, as an owed sum."""
        varies = self._varies.get(placed.node, frozenset()) - placed.sharding.axes - placed.sharding.owed
        if not varies:
            return placed
        owing = placed.sharding.owing([*placed.sharding.partial, *((axis, "sum") for axis in varies)])
        return self._times(placed, 1 / self._mesh.size(*varies), owing, placed.node)

    def move(self, placed: Placed, target: Sharding, user: fx.Node, final: bool = False) -> Placed:
        """The value lying as ``target`` for ``user``; ``final``: it leaves the graph so.

        Raises E0305 when a value would have to be reduced or gathered over microbatches, where nothing is declared of
        that; E0767 where it would have to be gathered over groups of which each stands for the batch.
        """
        target = target.canonical(self._mesh)
        found = self._path(placed, target)
        if any(MICRO in s.axes and s.kind not in ("shard", "owe") for s in found):
            self._check(placed.node, user)
        first = placed.node
        groups = self._groups(first, user) if found and not final else frozenset()
        if found and not final and (groups or self._varies.get(first)):
            placed = self._in_groups(placed, target, user, groups)
            found = self._path(placed, target)
        if not found:
            return placed
        source = placed.sharding.canonical(self._mesh)
        pays = bool(source.owed - target.owed)
        where = "" if pays else _shared_by(user, storage=Priority.STORAGE in placed.priority.values())
        key = (placed.node, target, where)
        if key in self._moved:
            return self._moved[key]
        made = self.graph.call_function(redistribute, (placed.node, str(source), str(target)))
        note, reader = annotation(placed.node), annotation(user)
        made.meta["val"] = placed.node.meta.get("val")
        # a sum is paid by the block that owes it, a weight gathered by the one that needs it: so every block does alike
        block = note.block if pays and placed.node.op != "placeholder" else reader.block
        made.meta["meshwright"] = replace(note, sharding=target, phase=reader.phase, block=block)
        self._varies[made] = self._varies.get(placed.node, frozenset()) - target.axes - target.owed
        self._apart.moved(made, placed.node, target)
        if target.owed - source.owed:
            self._apart.made_to_owe(made, user)
        if pays and not final:
            self._apart.pay(made, self._apart.meaning(first, user), user)
        if final:
            # at once, so that a gradient is cut as soon as it is there and the whole one is freed
            placed.node.append(made)
        weight = placed.weight and not final
        owed_in = placed.owed_in if target.owed else 0
        moved = Placed(made, target, self._priority(placed.priority, target), weight=weight, owed_in=owed_in)
        self._moved[key] = moved
        if pays and not target.owed and not final:
            self._paid[placed.node, groups] = moved
        return moved

    def _path(self, placed: Placed, target: Sharding) -> list[Step]:
        source = placed.sharding.canonical(self._mesh)
        return [s for s in steps(source, target, self._mesh) if s.kind != "resegment"]

    def _check(self, node: fx.Node, user: fx.Node) -> None:
        if not self._meanings.may_couple(user):
            raise _coupled(node, user)

    def _in_groups(self, placed: Placed, target: Sharding, user: fx.Node, groups: frozenset[str]) -> Placed:
        """The value with what it owes over groups taken from its own group alone; a mean of groups owed, where that is
        wanted of it. What is left to do does not concern groups."""
        source = placed.sharding
        owed = {(axis, op) for axis, op in source.partial if axis in groups and (axis, op) not in target.partial}
        varies = self._varies.get(placed.node, frozenset())
        owes = {axis for axis, _ in target.partial - source.partial} & varies
        scale = self._mesh.size(*(a for a, op in owed if op == "sum")) / self._mesh.size(*owes)
        partial = (source.partial - owed) | {(axis, "sum") for axis in owes}
        if owed or owes:
            key = (placed.node, Sharding(source.dims, partial), "in groups")
            if key not in self._moved:
                self._moved[key] = self._times(placed, scale, key[1], user)
                made = self._moved[key].node
                self._varies[made] = (varies | {a for a, _ in owed}) - owes
                self._apart.moved(made, placed.node, key[1])
                if owes:
                    self._apart.made_to_owe(made, user, mean=True)
                if owed:
                    self._apart.pay(made, self._apart.meaning(placed.node, user), user)
            placed = self._moved[key]
        # a group's value spread over samples is cut to those of the group; stored weights belong to no group
        local = ("all_reduce", "owe", "shard")
        gathers = {axis for s in self._path(placed, target) for axis in s.axes if s.kind not in local}
        if (gathers & groups and not placed.weight) or any(op == "logsumexp" for _, op in owed):
            raise _not_in_groups(placed.node, user)
        return placed

    def _times(self, placed: Placed, scale: float, sharding: Sharding, user: fx.Node) -> Placed:
        dtype = annotation(placed.node).dtype
        if scale != int(scale) and dtype is not None and not dtype.is_floating_point:
            raise _not_in_groups(placed.node, user)  # a mean of counts is none
        factor = int(scale) if scale == int(scale) else scale
        made = self.graph.call_function(torch.ops.aten.mul.Tensor, (placed.node, factor))
        placed.node.append(made)
        made.meta["val"] = placed.node.meta.get("val")
        note, reader = annotation(placed.node), annotation(user)
        made.meta["meshwright"] = replace(note, sharding=sharding, phase=reader.phase)
        return Placed(made, sharding, self._priority(placed.priority, sharding))

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


def _not_in_groups(node: fx.Node, user: fx.Node) -> Exception:
    target: Any = user.target
    name = getattr(target, "overloadpacket", getattr(target, "__name__", target))
    return error(
        "E0767",
        f"{name} needs each sample of the batch, so a group of the batch cannot stand for the whole here",
        annotation(user).origin,
        "declare it global",
        (f"the value {node.name} holds samples of other groups",),
    )
