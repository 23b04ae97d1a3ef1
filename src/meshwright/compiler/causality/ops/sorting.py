"""Sorting, choosing the largest, choosing by mask, counting."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from meshwright.compiler.causality.call import Call, tensors_in
from meshwright.compiler.causality.candidates import chosen_rows
from meshwright.compiler.causality.registry import replacement, rule
from meshwright.compiler.causality.shadow import Shadow, constant
from meshwright.compiler.causality.typed import joint_shape
from meshwright.compiler.causality.words import any_over, softened


@rule("aten.sort")
def sort(call: Call) -> Any:
    """Values and order, both told by items."""
    _, order = call.out
    own, indices = ordered(call, call["self"], order, call["dim"])
    return own, indices


@rule("aten.argsort", "aten.msort")
def argsort(call: Call) -> Shadow:
    """The order alone."""
    return ordered(call, call["self"], call.out, call.get("dim", 0))[1]


def ordered(call: Call, value: Tensor, order: Tensor, dim: int) -> tuple[Shadow, Shadow]:
    """The shadows of the sorted values and of the order."""
    if value.dim() == 0:
        own = call.settled(value)
        return own.plain(), own.plain()
    dim = dim % value.dim()
    inverse = _inverse(call, value, dim)
    if inverse is not None:
        return call.settled(value), inverse
    shadow = call.settled(value)
    if shadow.deps is None:
        flat = Shadow(shadow.known.all(dim, keepdim=True).expand(value.shape))
        return flat, flat
    joined = any_over(shadow.deps, (dim,), keepdim=True)
    if bool((shadow.deps == joined).all()):  # the sort brings nothing that each does not have already
        made = Shadow(shadow.known & False, joined.expand(shadow.deps.shape))
        return made, made
    listings = call.interpreter.listings
    count = value.shape[dim]
    keys = value.movedim(dim, -1).reshape(-1, count)
    deps = shadow.deps.movedim(dim, -2).reshape(-1, count, call.width)
    codes = listings.add(keys, deps).reshape(value.movedim(dim, -1).shape).movedim(-1, dim)
    item = codes.gather(dim, order)
    taken = shadow.deps.gather(dim, order.unsqueeze(-1).expand(*order.shape, call.width))
    return Shadow(shadow.known & False, taken, item), Shadow(constant(value.shape).known, None, item)


def _inverse(call: Call, value: Tensor, dim: int) -> Shadow | None:
    """The order of an order: the place of each item in its listing."""
    shadow = call.shadow(value)
    if shadow.item is None or not bool(shadow.known.all()) or value.is_floating_point():
        return None
    listings = call.interpreter.listings
    if not listings.complete(shadow.item) or listings.row_dims(shadow.item) != [dim]:
        return None
    line = torch.arange(value.shape[dim]).reshape([-1 if d == dim else 1 for d in range(value.dim())])
    places = value.argsort(dim)
    if not bool((value.gather(dim, places) == line).all()):
        return None
    rank = shadow.item.gather(dim, places)
    deps = softened(listings.order_of(shadow.item)).expand(*value.shape, call.width)
    return Shadow(constant(value.shape, False).known, deps, None, rank)


@rule("aten.topk")
def topk(call: Call) -> Any:
    """Any element may be among the largest."""
    value, values = call["self"], call.out[0]
    if value.dim() == 0:
        own = call.settled(value)
        return own.plain(), own.plain()
    dim = call["dim"] % value.dim()
    if values.shape[dim] == value.shape[dim]:
        return ordered(call, value, call.out[1], dim)
    shadow = call.settled(value)
    deps = None if shadow.deps is None else any_over(shadow.deps, (dim,), keepdim=True)
    if deps is not None:
        deps = deps.expand(*values.shape, call.width)
    made = Shadow(shadow.known.all(dim, keepdim=True).expand(values.shape), deps)
    return made, made


@replacement("aten.nonzero")
def nonzero(call: Call) -> Any:
    """All places that a computed mask could choose."""
    return chosen_rows(call, call["self"])


@replacement("aten.masked_select")
def masked_select(call: Call) -> Any:
    """The elements that a mask chooses, or could choose."""
    shape = joint_shape(call["self"].shape, call["mask"].shape)
    value = call["self"].expand(shape)
    rows, shadow = chosen_rows(call, call["mask"].expand(shape))
    places = tuple(rows.unbind(1))
    own = call.settled(call["self"]).expand(value.shape)
    taken = own.map(lambda x: x[places])
    deps = shadow.deps[:, 0] if shadow.deps is not None and rows.shape[1] else None
    if deps is not None and taken.deps is not None:
        deps = deps | taken.deps
    elif deps is None:
        deps = taken.deps
    known = taken.known & (shadow.known[:, 0] if rows.shape[1] else True)
    return value[places], Shadow(known, deps)


@rule(
    "aten.bincount",
    "aten.histc",
    "aten._unique2",
    "aten.unique_dim",
    "aten.unique_consecutive",
    "aten.histogram",
    "meshwright.count",
)
def counted(call: Call) -> Any:
    """Counts over all that was given."""
    union = torch.zeros(call.width, dtype=torch.int64)
    known = True
    for value in call.tensors():
        shadow = call.settled(value)
        known = known and bool(shadow.known.all())
        if shadow.deps is not None:
            union = union | any_over(shadow.deps.reshape(-1, call.width), (0,))
    outs = tensors_in(call.out)
    made = tuple(Shadow(constant(o.shape, known).known, None if known else union.expand(*o.shape, -1)) for o in outs)
    return made[0] if isinstance(call.out, Tensor) else made


@rule("aten.repeat_interleave.Tensor")
def repeated(call: Call) -> Shadow:
    """How often each place is repeated: places after it move with it."""
    shadow = call.settled(call["repeats"])
    known = bool(shadow.known.all())
    union = None if shadow.deps is None else softened(any_over(shadow.deps, (0,))).expand(*call.out.shape, -1)
    return Shadow(constant(call.out.shape, known).known, union)


@rule("aten._local_scalar_dense", "aten.item", "prims.item")
def read(call: Call) -> Any:
    """A number that the program reads; ``reading.py`` sees those that the user's code reads."""
    return None


@rule("aten.equal")
def equal(call: Call) -> Any:
    """Likewise."""
    return None


@rule("aten.bitwise_not", "aten.logical_not")
def negated(call: Call) -> Shadow:
    """Keeps what the operand is."""
    return replace(call.shadow(call["self"]), rank=None, trait=None)
