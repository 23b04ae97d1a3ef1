"""Whether a node is the same along a dim, so that it does not matter in which order the rows stand there."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from meshwright.compiler.graph.calls import op_call, operand_nodes
from meshwright.compiler.rules import rule_of

aten = torch.ops.aten
_FILLS: dict[Any, int | float] = {
    aten.zeros.default: 0, aten.new_zeros.default: 0, aten.zeros_like.default: 0, aten.ones.default: 1,
    aten.new_ones.default: 1, aten.ones_like.default: 1, aten.empty.memory_format: 0, aten.empty_like.default: 0,
    aten.new_empty.default: 0,
}  # fmt: skip
_GIVEN = {aten.full.default: 1, aten.full_like.default: 1, aten.new_full.default: 2}


def filled_with(node: fx.Node) -> int | float | None:
    """The number that all elements of a node are; of memory that holds nothing yet, zero."""
    number: Any = node.args[_GIVEN[node.target]] if node.target in _GIVEN else _FILLS.get(node.target)
    return number if isinstance(number, (int, float)) else None


def steady(node: fx.Node, dim: int, depth: int = 8) -> bool:
    """Whether a node is the same along a dim: filled with one number, expanded there, or made of such nodes."""
    if filled_with(node) is not None or node.meta["val"].shape[dim] == 1:
        return True
    call = op_call(node)
    rule = rule_of(call) if call is not None else None
    if (
        rule is None
        or not depth
        or rule.results[0] is None
        or rule.indexed
        or rule.contiguous
        or not operand_nodes(node)
    ):
        return False
    factors = rule.results[0][dim]
    if len(factors) != 1 or factors[0] in rule.whole | rule.masked or factors[0] in rule.relations:
        return False
    for source, dims in zip(operand_nodes(node), rule.operands, strict=True):
        for d, found in enumerate(dims):
            if factors[0] in found and not (len(found) == 1 and steady(source, d, depth - 1)):
                return False
    return True
