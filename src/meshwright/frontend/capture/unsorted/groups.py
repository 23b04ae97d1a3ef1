"""Whether rows are grouped by the keys they were sorted by: where the groups end, and which keys there can be."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable

import torch
from torch import fx

from meshwright.frontend.capture.unsorted.states import Listing, arguments

aten = torch.ops.aten
_VIEWS = {
    aten.reshape.default, aten.unsqueeze.default, aten.squeeze.dim, aten.squeeze.dims, aten.squeeze.default,
    aten.permute.default, aten.transpose.int, aten.t.default, aten.clone.default,
}  # fmt: skip
_EXACT = {torch.int16: 1 << 15, torch.int32: 1 << 31, torch.int64: 1 << 63, torch.float32: 1 << 24, torch.float64: 1 << 53}
"""Dtypes of keys, and up to which number they tell all apart."""
Source = Callable[[fx.Node], fx.Node | None]
"""Of a node that holds the keys in sorted order: the node that holds them in true order."""


def ends_of_groups(ends: fx.Node, listing: Listing, groups: int, unsorted: Source) -> bool:
    """Whether rows in the order of a listing, cut at ``ends``, are cut into those of key 0, of key 1 and so on."""
    if not listing.ascending or not _within(_keys(listing.keys, unsorted), groups):
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
        return node.args[0] if fits and given["max"] > 0 else None  # type: ignore[return-value]  # a tensor
    if node.target is torch.ops.meshwright.count.default:
        return node.args[0] if node.args[1] == groups else None  # type: ignore[return-value]  # a tensor
    if node.target is aten.sum.dim_IntList:
        marks = node.args[0]
        assert isinstance(marks, fx.Node)
        marks = _uncast(marks)
        rank = len(marks.meta["val"].shape)
        over = {d % rank for d in node.args[1]}  # type: ignore[union-attr]  # dims
        if marks.target is aten.one_hot.default and marks.meta["val"].shape[-1] == groups and over == {*range(rank - 1)}:
            return marks.args[0]  # type: ignore[return-value]  # a tensor
    return None


def _uncast(node: fx.Node) -> fx.Node:
    while node.target is aten._to_copy.default:
        node = node.args[0]  # type: ignore[assignment]  # a tensor
    return node


def _keys(node: fx.Node, unsorted: Source) -> fx.Node:
    """The node that the keys come from, by way of views, casts and the sort."""
    while True:
        exact = node.target is aten._to_copy.default and node.meta["val"].dtype in _EXACT
        if node.target in _VIEWS or exact:
            node = node.args[0]  # type: ignore[assignment]  # a tensor
            continue
        before = unsorted(node)
        if before is None:
            return node
        node = before


def _within(keys: fx.Node, groups: int) -> bool:
    """Whether keys are numbers from 0 to less than ``groups``: places in a dim of no larger size, or remainders."""
    source, at = keys, None
    if keys.target is operator.getitem:
        source, at = keys.args[0], keys.args[1]  # type: ignore[assignment]  # what getitem reads
    name = str(source.target).removeprefix("aten.").partition(".")[0]
    if name == "remainder" and at is None:
        divisor = source.args[1]
        return isinstance(divisor, int) and 0 < divisor <= groups and not keys.meta["val"].is_floating_point()
    if (name, at) not in (("topk", 1), ("sort", 1), ("max", 1), ("min", 1), ("argmax", None), ("argmin", None)):
        return False
    given = arguments(source)
    shape, dim = given["self"].meta["val"].shape, given.get("dim")
    size = math.prod(shape) if dim is None else shape[dim]
    return int(size) <= groups
