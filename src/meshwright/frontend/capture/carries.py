"""Which values still have the batch dim: found for the values that depend on the batch alone.

A label mask keeps it, the number of valid labels has lost it. Where it cannot be told, a value is
taken to keep it if one of its dims is a multiple of the batch size.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

aten = torch.ops.aten


@dataclass(frozen=True)
class Carries:
    """The batch is in ``dim``, between ``outer`` (major) and ``inner`` (minor) elements of that dim."""

    dim: int
    outer: int = 1
    inner: int = 1


@dataclass(frozen=True)
class Lost:
    """The value was reduced over the batch."""


@dataclass(frozen=True)
class Unrelated:
    """The value does not depend on the samples."""


@dataclass(frozen=True)
class Unclear:
    """The batch is somewhere in the value."""


State = Carries | Lost | Unrelated | Unclear


def follow(node: fx.Node, states: dict[fx.Node, State], batch: int) -> State:
    """The state of a call's result (of its first tensor) from those of its operands."""
    operands = [(n, states[n]) for n in node.all_input_nodes]
    cut = [(n, s) for n, s in operands if isinstance(s, (Carries, Unclear))]
    if node.target is aten.expand.default and not cut:
        return Unclear() if any(isinstance(s, Lost) for _, s in operands) else Unrelated()
    if not cut:
        return Lost() if any(isinstance(s, Lost) for _, s in operands) else Unrelated()
    value = node.meta.get("val")
    value = value[0] if isinstance(value, (tuple, list)) else value
    if not isinstance(value, Tensor):
        return Unclear()
    found = _known(node, cut, value)
    if found is not None:
        return found
    return Unclear() if any(n % batch == 0 for n in value.shape) else Lost()


def _known(node: fx.Node, cut: Sequence[tuple[fx.Node, State]], value: Tensor) -> State | None:
    """The state where the op is one that we can follow."""
    source, state = cut[0]
    if not isinstance(state, Carries) or any(not isinstance(s, Carries) for _, s in cut):
        return None
    shape = source.meta["val"].shape
    target: Any = node.target
    args: list[Any] = list(node.args)
    if torch.Tag.pointwise in getattr(target, "tags", ()) or target in _LIKE_POINTWISE:
        found = {Carries(s.dim - n.meta["val"].dim(), s.outer, s.inner) for n, s in cut if isinstance(s, Carries)}
        if len(found) != 1:
            return None
        one = found.pop()
        return Carries(one.dim + value.dim(), one.outer, one.inner)
    if len(cut) != 1 or source is not args[0]:
        return None
    if target is aten.reshape.default:
        return _reshaped(state, list(shape), list(value.shape))
    if target in _REDUCTIONS:
        return _reduced(node, state, len(shape))
    if target is aten.unsqueeze.default:
        dim = args[1] % value.dim()
        return Carries(state.dim + (dim <= state.dim), state.outer, state.inner)
    if target is aten.transpose.int:
        a, b = (d % len(shape) for d in args[1:3])
        return Carries({a: b, b: a}.get(state.dim, state.dim), state.outer, state.inner)
    if target is aten.permute.default:
        dims = [d % len(shape) for d in args[1]]
        return Carries(dims.index(state.dim), state.outer, state.inner)
    if target in _ALONG_A_DIM and len(shape) == value.dim():
        same = shape[state.dim] == value.shape[state.dim]
        return state if same else None
    if target is aten.select.int:
        dim = args[1] % len(shape)
        return Lost() if dim == state.dim else Carries(state.dim - (dim < state.dim), state.outer, state.inner)
    return None


def _reduced(node: fx.Node, state: Carries, rank: int) -> State:
    dims: Any = node.args[1] if len(node.args) > 1 else None
    if dims is None or dims == []:
        return Lost()
    over = {d % rank for d in ([dims] if isinstance(dims, int) else dims)}
    if state.dim in over:
        return Lost()
    keepdim = bool(node.args[2]) if len(node.args) > 2 else bool(node.kwargs.get("keepdim", False))
    return Carries(state.dim - (0 if keepdim else sum(d < state.dim for d in over)), state.outer, state.inner)


def _reshaped(state: Carries, before: list[int], after: list[int]) -> State | None:
    """Where the batch stands after a reshape: its place is fixed by how many elements are major to it."""
    major = math.prod(before[: state.dim]) * state.outer
    size = before[state.dim] // (state.outer * state.inner)
    ahead = 1
    for dim, length in enumerate(after):
        if length != 1 and major % ahead == 0:
            outer = major // ahead
            if length % (outer * size) == 0:
                return Carries(dim, outer, length // (outer * size))
        ahead *= length
    return None


_LIKE_POINTWISE = {
    aten._to_copy.default,
    aten.clone.default,
    aten.expand.default,
    aten.where.self,
    aten.masked_fill.Scalar,
    aten.masked_fill.Tensor,
}
_REDUCTIONS = {
    aten.sum.default,
    aten.sum.dim_IntList,
    aten.any.default,
    aten.any.dim,
    aten.all.default,
    aten.all.dim,
    aten.amax.default,
    aten.amin.default,
    aten.max.default,
    aten.min.default,
    aten.max.dim,
    aten.min.dim,
    aten.argmax.default,
    aten.argmin.default,
    aten.count_nonzero.default,
}
_ALONG_A_DIM = {
    aten.slice.Tensor,
    aten.constant_pad_nd.default,
    aten.cumsum.default,
    aten.flip.default,
    aten.squeeze.dims,
}
