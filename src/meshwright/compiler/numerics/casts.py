"""Reading floating dtypes and casts off the nodes of a graph."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from meshwright.compiler.graph.program import annotation

HALVES = (torch.bfloat16, torch.float16)
"""The floating dtypes of 16 bits."""
CAST = torch.ops.aten._to_copy.default


def dtype_of(node: fx.Node) -> torch.dtype | None:
    """The dtype of the one tensor that a node yields; None if it yields none, or several."""
    value: Any = node.meta.get("val")
    if isinstance(value, Tensor):
        return value.dtype
    return annotation(node).dtype if value is None else None


def shape_of(node: fx.Node) -> tuple[int, ...]:
    """The shape of the one tensor that a node yields: local, in the graph of a rank."""
    value: Any = node.meta.get("val")
    return tuple(value.shape) if isinstance(value, Tensor) else annotation(node).shape


def half(node: fx.Node) -> bool:
    """Whether a node yields one tensor in half precision."""
    return dtype_of(node) in HALVES


def is_cast(node: fx.Node) -> bool:
    """Whether a node casts one floating dtype to another."""
    if node.target is not CAST or not isinstance(node.args[0], fx.Node):
        return False
    before, after = dtype_of(node.args[0]), dtype_of(node)
    return before is not None and after is not None and before.is_floating_point and after.is_floating_point


def narrows(node: fx.Node) -> bool:
    """Whether a node casts a wider floating dtype to half precision."""
    source = node.args[0] if node.args else None
    return is_cast(node) and half(node) and isinstance(source, fx.Node) and not half(source)


def widens(node: fx.Node) -> bool:
    """Whether a node casts half precision to a wider dtype."""
    source = node.args[0] if node.args else None
    return is_cast(node) and not half(node) and isinstance(source, fx.Node) and half(source)


def is_view(node: fx.Node) -> bool:
    """Whether a node only regroups or picks the elements of its first operand, which it shares or copies."""
    if not isinstance(node.target, torch._ops.OpOverload) or not node.all_input_nodes:
        return False
    name = node.target._schema.name
    if name in ("aten::clone", "aten::_unsafe_view", "aten::contiguous"):
        return True
    return any(r.alias_info is not None for r in node.target._schema.returns) and len(node.all_input_nodes) == 1


def through_views(node: fx.Node) -> fx.Node:
    """The value that a chain of views begins with."""
    while is_view(node):
        node = node.all_input_nodes[0]
    return node
