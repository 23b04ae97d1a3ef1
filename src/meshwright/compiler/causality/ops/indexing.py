"""Reading by index: exactly, where the index is known; anything along the axis, where it is computed."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from meshwright.compiler.causality.call import Call
from meshwright.compiler.causality.candidates import expand_masks
from meshwright.compiler.causality.registry import replacement, rule
from meshwright.compiler.causality.shadow import Shadow, constant
from meshwright.compiler.causality.typed import joint_shape
from meshwright.compiler.causality.words import any_over, softened


@replacement("aten.index.Tensor", "aten._unsafe_index.Tensor")
def index(call: Call) -> Any:
    """``self[i, j, ...]``; a mask that is computed chooses all that it could choose."""
    value = call["self"]
    made = expand_masks(call, call["indices"], value)
    if made is None:
        return NotImplemented
    indices, shadows = made
    out = torch.ops.aten.index.Tensor(value, indices)
    return out, picked(call, value, indices, shadows, out)


def picked(
    call: Call, value: Tensor, indices: list[Tensor | None], shadows: list[Shadow | None], out: Tensor
) -> Shadow:
    """The shadow of ``value[indices]`` with integer indices, ``shadows`` being those of the indices."""
    source = call.shadow(value)
    used = [(d, i, s) for d, (i, s) in enumerate(zip(indices, shadows, strict=True)) if i is not None and s is not None]
    shape = joint_shape(*(i.shape for _, i, _ in used))
    place = _place([d for d, _, _ in used])
    if source.deps is None and all(s.deps is not None or s.item is not None for _, _, s in used):
        call.interpreter.notes.rows.update(value.shape[d] for d, i, _ in used if i.dtype == torch.int64)
    if source.item is not None and not _by_rank(source, used):
        source = call.settled(value)
    ends_listing = source.item is not None
    index_shadow = _index_shadow(call, used, shape)
    loose = [d for d, _, s in used if not bool(s.known.all()) and not ends_listing]
    picked_from = _spread(source, value, loose)
    taken = picked_from.map(
        lambda x: torch.ops.aten.index.Tensor(x, indices), lambda x: torch.ops.aten.index.Tensor(x, indices)
    )

    def aligned(field: Tensor, words: bool) -> Tensor:
        tail = field.shape[len(shape) :]
        inner = [1] * (out.dim() - place - len(shape))
        return (
            field.reshape(*[1] * place, *shape, *inner, *tail) if words else field.reshape(*[1] * place, *shape, *inner)
        )

    spread_index = index_shadow.map(lambda x: aligned(x, False), lambda x: aligned(x, True)).expand(out.shape)
    known = taken.known & spread_index.known
    deps = taken.deps
    if spread_index.deps is not None and not ends_listing:
        deps = spread_index.deps if deps is None else deps | spread_index.deps
    item = spread_index.item
    if ends_listing:
        return Shadow(taken.known & False, deps)
    trait = taken.trait if not loose else None
    return Shadow(known, deps, item, taken.rank if item is None else None, trait)


def _place(dims: list[int]) -> int:
    """Where in the result the dims of the indices stand."""
    return dims[0] if dims == list(range(dims[0], dims[0] + len(dims))) else 0


def _by_rank(source: Shadow, used: list[tuple[int, Tensor, Shadow]]) -> bool:
    """Whether an index is the inverse of the order in which the source is written: reads each item's own row."""
    found = [(d, i, s) for d, i, s in used if s.rank is not None]
    if len(found) != 1 or source.item is None:
        return False
    dim, index_value, shadow = found[0]
    others = [slice(0, 1)] * source.item.dim()
    others[dim] = slice(None)
    rows = source.item[tuple(others)].reshape(-1)
    if not bool((source.item == rows.reshape([-1 if d == dim else 1 for d in range(source.item.dim())])).all()):
        return False
    assert shadow.rank is not None
    return bool((rows[index_value.long()] == shadow.rank).all()) and bool((shadow.rank != 0).all())


def _index_shadow(call: Call, used: list[tuple[int, Tensor, Shadow]], shape: torch.Size) -> Shadow:
    """Of all indices together: what decides which element is read."""
    values = [i.expand(shape) for _, i, _ in used]
    shadows = [s.expand(shape) for _, _, s in used]
    joined, item = call.interpreter.listings.joined(shadows, values, shape)
    known, deps = constant(shape).known, None
    for shadow in joined:
        known = known & shadow.known
        if shadow.deps is not None:
            deps = shadow.deps if deps is None else deps | shadow.deps
    return Shadow(known, deps, item)


def _spread(source: Shadow, value: Tensor, dims: list[int]) -> Shadow:
    """The source with any element along dims for each of them, by way of a choice."""
    if not dims:
        return source
    deps = source.deps
    if deps is not None:
        union = softened(any_over(deps, dims, keepdim=True))
        same = bool((deps == deps.narrow(dims[0], 0, 1)).all()) if value.shape[dims[0]] else True
        deps = deps if same and len(dims) == 1 else union.expand(deps.shape)
    return Shadow(constant(source.known.shape, False).known, deps, source.item)


@rule("aten.index_select")
def index_select(call: Call) -> Shadow:
    value, places = call["self"], call["index"]
    dim = call["dim"] % max(value.dim(), 1)
    places = places.reshape(-1)
    shadow = call.shadow(call["index"]).map(lambda x: x.reshape(-1), lambda x: x.reshape(-1, call.width))
    indices: list[Tensor | None] = [None] * dim + [places.long()]
    return picked(call, value, indices, [None] * dim + [shadow], call.out)


@rule("aten.embedding")
def embedding(call: Call) -> Shadow:
    places = call["indices"]
    return picked(call, call["weight"], [places.long()], [call.shadow(places)], call.out)


@rule("aten.embedding_renorm")
def embedding_renorm(call: Call) -> Shadow:
    """Which rows are scaled down depends on the tokens; the scaled rows are the same whenever they are read."""
    return call.shadow(call["self"])


@rule("aten.gather")
def gather(call: Call) -> Shadow:
    value, dim, places = call["self"], call["dim"], call["index"]
    if value.dim() == 0:
        return call.settled(value)
    grid: list[Tensor | None] = []
    shadows: list[Shadow | None] = []
    for d in range(value.dim()):
        if d == dim % value.dim():
            grid.append(places)
            shadows.append(call.shadow(places))
        else:
            line = torch.arange(places.shape[d]).reshape([-1 if k == d else 1 for k in range(value.dim())])
            grid.append(line)
            shadows.append(constant(line.shape))
    shadow = call.shadow(places)
    source = call.shadow(value)
    if shadow.rank is not None and source.item is not None:
        ended = _gather_by_rank(source, shadow, places, dim % value.dim())
        if ended is not None:
            return ended
    if shadow.item is not None and source.item is None:
        return _gather_in_listing(call, value, source, shadow, grid)
    return picked(call, value, grid, shadows, call.out)


def _gather_by_rank(source: Shadow, shadow: Shadow, places: Tensor, dim: int) -> Shadow | None:
    assert source.item is not None and shadow.rank is not None
    found = source.item.gather(dim, places)
    if not bool((found == shadow.rank).all()):
        return None
    deps = source.deps
    if deps is not None:
        deps = deps.gather(dim, places.unsqueeze(-1).expand(*places.shape, deps.shape[-1]))
    return Shadow(torch.zeros_like(found, dtype=torch.bool), deps)


def _gather_in_listing(call: Call, value: Tensor, source: Shadow, shadow: Shadow, grid: list[Tensor | None]) -> Shadow:
    """By an order (known for each item) along its own axis: what the item itself has there."""
    if not bool(shadow.known.all()):
        return picked(
            call,
            value,
            grid,
            [call.settled(call["index"]) if g is call["index"] else constant(g.shape) for g in grid if g is not None],
            call.out,
        )
    own = source.map(lambda x: torch.ops.aten.index.Tensor(x, grid), lambda x: torch.ops.aten.index.Tensor(x, grid))
    deps = own.deps
    if shadow.deps is not None:
        deps = shadow.deps if deps is None else deps | shadow.deps
    return Shadow(own.known & shadow.known, deps, shadow.item)


@rule("aten.searchsorted", "aten.bucketize")
def search(call: Call) -> Shadow:
    """A value among sorted ones: on itself and all of those."""
    table = call.arguments.get("sorted_sequence", call.get("boundaries"))
    value = call.arguments.get("input", call["self"] if "self" in call.arguments else None)
    row, own = call.settled(table), call.settled(value).expand(call.out.shape)
    deps = own.deps
    if row.deps is not None:
        wide = any_over(row.deps, (row.known.dim() - 1,), keepdim=True)
        wide = wide.expand(*call.out.shape, call.width) if row.known.dim() > 1 else wide.reshape(-1)
        deps = call.words(own) | wide
    return Shadow(own.known & row.known.all(), deps)
