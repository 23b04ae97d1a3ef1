"""The gradient of rows that were looked up: written as what it is, a sum over the places that read each row.

ATen writes it into zeros at these places, in a form of which only the kernel knows that nothing else is there, so that
it could not be cut over the batch. A write that wraps negative places around has them made positive first.
"""

from __future__ import annotations

import math
import operator
from typing import Any

import torch
from torch import fx

from meshwright.compiler.graph.program import annotation
from meshwright.frontend.capture.unsorted.groups import natural
from meshwright.frontend.capture.unsorted.steady import filled_with

aten = torch.ops.aten


def rewrite_lookups(module: fx.GraphModule) -> None:
    """Rewrite in place; every new node has the provenance of the old one."""
    for node in list(module.graph.nodes):
        if node.target in (aten.index_put.default, aten._unsafe_index_put.default) and _adds_rows(node):
            with module.graph.inserting_before(node):
                node.replace_all_uses_with(_sum(node))
            module.graph.erase_node(node)


def _adds_rows(node: fx.Node) -> bool:
    """Whether floating rows of a gradient are added up, each at a place of its own, and nothing else."""
    if annotation(node).phase != "backward":
        return False  # what the model itself adds up stays as it was written, and findings name it so
    base, indices, values = node.args[:3]
    assert isinstance(base, fx.Node) and isinstance(values, fx.Node) and isinstance(indices, (list, tuple))
    accumulate = node.args[3] if len(node.args) > 3 else node.kwargs.get("accumulate", False)
    if not accumulate or len(indices) != 1 or not isinstance(indices[0], fx.Node) or filled_with(base) != 0:
        return False
    whole, index, rows = base.meta["val"], indices[0].meta["val"], values.meta["val"]
    return bool(
        index.dtype in (torch.int32, torch.int64)
        and whole.is_floating_point()
        and rows.dtype == whole.dtype
        and list(rows.shape) == [*index.shape, *whole.shape[1:]]
    )


def _sum(node: fx.Node) -> fx.Node:
    base, indices, values = node.args[:3]
    assert isinstance(base, fx.Node) and isinstance(values, fx.Node) and isinstance(indices, (list, tuple))
    (index,) = indices
    assert isinstance(index, fx.Node)
    shape = list(base.meta["val"].shape)
    count, width = shape[0], math.prod(shape[1:])
    if not natural(index):
        index = _call(node, aten.remainder.Scalar, index, count)
    flat = _reshaped(node, values, [*index.meta["val"].shape, width])
    made = _call(node, torch.ops.meshwright.embedding_backward.default, flat, index, count, 0, -1)
    return _reshaped(node, made, shape)


def _reshaped(like: fx.Node, x: fx.Node, shape: list[int]) -> fx.Node:
    return x if list(x.meta["val"].shape) == shape else _call(like, aten.reshape.default, x, shape)


def _call(like: fx.Node, target: Any, *args: Any) -> fx.Node:
    made = like.graph.call_function(target, args)
    given = fx.map_arg(args, operator.attrgetter("meta"))
    with like.meta["val"].fake_mode:
        made.meta["val"] = target(*(a["val"] if isinstance(a, dict) else a for a in given))
    note, source = annotation(made), annotation(like)
    note.origin, note.block, note.phase = source.origin, source.block, source.phase
    return made
