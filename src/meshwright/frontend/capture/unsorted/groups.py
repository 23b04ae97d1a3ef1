"""Whether rows are grouped by the keys they were sorted by: where the groups end, and which keys there can be."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from meshwright.frontend.capture.constants import constant_nodes, evaluate
from meshwright.frontend.capture.unsorted.states import Listing, arguments

aten = torch.ops.aten
_VIEWS = {
    aten.reshape.default, aten.unsqueeze.default, aten.squeeze.dim, aten.squeeze.dims, aten.squeeze.default,
    aten.permute.default, aten.transpose.int, aten.t.default, aten.clone.default,
}  # fmt: skip
_EXACT = {
    torch.int16: 1 << 15,
    torch.int32: 1 << 31,
    torch.int64: 1 << 63,
    torch.float32: 1 << 24,
    torch.float64: 1 << 53,
}
"""Dtypes of keys, and up to which number they tell all apart."""
Source = Callable[[fx.Node], fx.Node | None]
"""Of a node that holds the keys in sorted order: the node that holds them in true order."""


def ends_of_groups(ends: fx.Node, listing: Listing, groups: int, unsorted: Source) -> bool:
    """Whether rows in the order of a listing, cut at ``ends``, are cut into those of key 0, of key 1 and so on."""
    if not listing.ascending or not natural(_keys(listing.keys, unsorted), groups):
        return False
    total = _uncast(ends)
    if total.target is not aten.cumsum.default or len(total.meta["val"].shape) != 1:
        return False
    counted = _counted(_uncast(arguments(total)["self"]), groups)
    if counted is None or math.prod(counted.meta["val"].shape) != listing.size:
        return False
    return _keys(counted, unsorted) is _keys(listing.keys, unsorted)


def _counted(node: fx.Node, groups: int) -> fx.Node | None:
    """What a node counts, one number for each group."""
    if node.target is aten.histc.default:
        given = arguments(node)
        fits = given["bins"] == groups and given["min"] == 0 and given["max"] in (groups - 1, groups)
        return _node(given["self"]) if fits and given["max"] > 0 else None
    if node.target is torch.ops.meshwright.count.default:
        given = arguments(node)
        return _node(given["x"]) if given["bins"] == groups else None
    if node.target is aten.sum.dim_IntList:
        given = arguments(node)
        marks = _uncast(given["self"])
        rank = marks.meta["val"].dim()
        if marks.target is aten.eq.Tensor and {d % rank for d in given["dim"]} == {*range(rank - 1)}:
            keys, numbers = marks.args
            if isinstance(keys, fx.Node) and isinstance(numbers, fx.Node) and _from_zero(numbers, groups):
                return keys if keys.meta["val"].shape[-1] == 1 else None
    return None


def _node(value: Any) -> fx.Node:
    assert isinstance(value, fx.Node)
    return value


def _from_zero(node: fx.Node, count: int) -> bool:
    """Whether a node is the numbers from 0 on, as many as ``count``, along its only dim."""
    if list(node.meta["val"].shape) != [count] or node not in constant_nodes(node.graph):
        return False
    return evaluate(node).tolist() == list(range(count))


def _uncast(node: fx.Node) -> fx.Node:
    while node.target is aten._to_copy.default:
        node = _node(node.args[0])
    return node


def _keys(node: fx.Node, unsorted: Source) -> fx.Node:
    """The node that the keys come from, by way of views, casts and the sort."""
    while True:
        exact = node.target is aten._to_copy.default and node.meta["val"].dtype in _EXACT
        if node.target in _VIEWS or exact:
            node = _node(node.args[0])
            continue
        before = unsorted(node)
        if before is None:
            return node
        node = before


def natural(node: fx.Node, below: int | None = None) -> bool:
    """Whether integers are surely 0 or more, and less than ``below``: places in a dim of no larger size, remainders."""
    keys = _keys(node, lambda _: None)
    source, at = (_node(keys.args[0]), keys.args[1]) if keys.target is operator.getitem else (keys, None)
    name = str(source.target).removeprefix("aten.").partition(".")[0]
    if name == "remainder" and at is None:
        divisor = source.args[1]
        fits = isinstance(divisor, int) and divisor > 0 and (below is None or divisor <= below)
        return fits and not keys.meta["val"].is_floating_point()
    if (name, at) not in (("topk", 1), ("sort", 1), ("max", 1), ("min", 1), ("argmax", None), ("argmin", None)):
        return False
    given = arguments(source)
    shape, dim = given["self"].meta["val"].shape, given.get("dim")
    size = math.prod(shape) if dim is None else shape[dim]
    return below is None or int(size) <= below
