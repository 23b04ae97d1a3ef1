"""Which ops of an update may write their result over their first operand.

A functional graph makes a new tensor at each op. Where the first operand of a pointwise op is read by nobody
afterwards, neither under its own name nor through a view, its memory can take the result: ``mul`` becomes
``mul_``, and a parameter updated so needs no copy at the end.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from meshwright.compiler.analysis.offloading import TO_HOST
from meshwright.compiler.graph import collectives
from meshwright.compiler.graph.adapter import OpOverload, overload_name
from meshwright.compiler.graph.functions import COLLECTIVES

VIEWS = ("shard", "fill_padding", "owe")
"""Functions of a rank program that may return their argument or a part of it."""


class Memory:
    """In whose memory each value of a graph lives, in a given order of execution."""

    def __init__(self, order: Sequence[fx.Node], writable: set[fx.Node], kept: set[fx.Node]) -> None:
        """``writable`` are the inputs that may be overwritten; ``kept`` the values that are read at the end."""
        self.owners: dict[fx.Node, frozenset[fx.Node]] = {}
        self.written: dict[fx.Node, fx.Node] = {}
        """Values that are, after all, an input written in place: the very same tensor."""
        self.reused: set[fx.Node] = set()
        """Nodes whose op writes over its first operand."""
        self._position = {n: i for i, n in enumerate(order)}
        self._living: dict[fx.Node, list[fx.Node]] = {}
        self._writable = writable
        self._kept = kept
        for node in order:
            self._place(node)

    def _place(self, node: fx.Node) -> None:
        operand = node.args[0] if node.args else None
        if node.target is TO_HOST and isinstance(operand, fx.Node):
            self.owners[node] = self.owners[operand]
            self.written[node] = operand
        elif isinstance(operand, fx.Node) and in_place_target(node) is not None and self._free(operand, node):
            self.reused.add(node)
            self.owners[node] = self.owners[operand]
            origin = operand if operand.op == "placeholder" else self.written.get(operand)
            if origin is not None:
                self.written[node] = origin
        elif _allocates(node):
            self.owners[node] = frozenset([node])
        else:
            self.owners[node] = frozenset().union(*(self.owners[n] for n in node.all_input_nodes))
        for owner in self.owners[node]:
            self._living.setdefault(owner, []).append(node)

    def _free(self, operand: fx.Node, node: fx.Node) -> bool:
        """Whether nothing but ``node`` reads the operand's memory from now on."""
        owners = self.owners[operand]
        if operand not in owners and operand not in self.reused:
            return False  # a view: it may be expanded, or only a part
        if any(o.op == "placeholder" and o not in self._writable for o in owners):
            return False
        others = [n for n in node.all_input_nodes if n is not operand]
        if any(self.owners[n] & owners for n in others):
            return False
        now = self._position[node]
        for value in (v for o in owners for v in self._living[o]):
            if value in self._kept or any(self._position.get(u, -1) > now for u in value.users):
                return False
        return True


def in_place_target(node: fx.Node) -> OpOverload | None:
    """The op that does the same over its first operand, where shape and dtype of the two are the same."""
    target = node.target
    if not isinstance(target, OpOverload) or torch.Tag.pointwise not in target.tags or not node.args:
        return None
    first = node.args[0]
    before = first.meta.get("val") if isinstance(first, fx.Node) else None
    after = node.meta.get("val")
    if not isinstance(before, Tensor) or not isinstance(after, Tensor):
        return None
    if before.shape != after.shape or before.dtype != after.dtype or target.namespace != "aten":
        return None
    _, name, variant = overload_name(target).split(".", 2)
    found: Any = getattr(getattr(torch.ops.aten, f"{name}_", None), variant, None)
    return found if isinstance(found, OpOverload) else None


def _allocates(node: fx.Node) -> bool:
    """Whether the node's value is in memory of its own."""
    if node.op == "placeholder":
        return True
    if isinstance(node.target, OpOverload):
        return not any(r.alias_info is not None for r in node.target._schema.returns)
    if node.target is operator.getitem:
        source = node.args[0]
        # the results of one op, or the pieces of one message, lie beside each other
        return isinstance(source, fx.Node) and _allocates(source)
    if node.target in collectives.BEGINS:
        return False  # the message reads its operands until it is waited for
    name = getattr(node.target, "__name__", "")
    return COLLECTIVES.get(name) is node.target and name not in VIEWS
