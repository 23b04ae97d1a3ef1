"""Which values the integer tensors of a batch may hold: rows of tables that they look up, classes that they name.

A shard of a table answers zero for rows that it does not have, so an index outside the whole table would pass
in silence where one device raises an error. The runtime checks batches against these bounds instead.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from meshwright.compiler.graph.program import StepProgram

aten = torch.ops.aten
_SAME_VALUES = {
    aten.reshape.default,
    aten.view.default,
    aten.slice.Tensor,
    aten.expand.default,
    aten.permute.default,
    aten.unsqueeze.default,
    aten.squeeze.dims,
    aten.constant_pad_nd.default,
    aten._to_copy.default,
    aten.masked_fill.Scalar,
}


@dataclass(frozen=True)
class Bound:
    """Values from 0 to ``size`` - 1, and those that the step masks out (an ignore index)."""

    size: int
    ignored: frozenset[int] = frozenset()


def index_bounds(program: StepProgram) -> dict[str, Bound]:
    """By batch tensor: the bound of the smallest table or number of classes that its values index."""
    roles = {node: value for value, node in program.micro.placeholders().items()}
    found: dict[str, Bound] = {}
    for node in program.micro.module.graph.nodes:
        size = _size(node)
        if size is None:
            continue
        arguments: tuple[Any, ...] = node.args
        index, ignored = arguments[1], set[int]()
        while isinstance(index, fx.Node) and index.target in _SAME_VALUES:
            if index.target is aten.masked_fill.Scalar:
                ignored |= _compared(index.args[1])
            index = index.args[0]
        value = roles.get(index) if isinstance(index, fx.Node) else None
        if value is not None and value.kind == "batch":
            before = found.get(value.name)
            if before is None or size < before.size:
                found[value.name] = Bound(size, frozenset(ignored))
    return found


def _size(node: fx.Node) -> int | None:
    table: Any = node.args[0] if node.args else None
    if node.target is torch.ops.meshwright.embedding.default:
        return int(table.meta["val"].shape[0])
    if node.target is torch.ops.meshwright.pick.default:
        return int(table.meta["val"].shape[-1])
    return None


def _compared(mask: Any) -> set[int]:
    """The numbers with which a mask compares."""
    found: set[int] = set()
    pending = [mask]
    while pending:
        node = pending.pop()
        if not isinstance(node, fx.Node):
            continue
        arguments: tuple[Any, ...] = node.args
        if node.target in (aten.ne.Scalar, aten.eq.Scalar):
            found.add(int(arguments[1]))
        elif node.op == "call_function":
            pending.extend(node.all_input_nodes)
    return found
