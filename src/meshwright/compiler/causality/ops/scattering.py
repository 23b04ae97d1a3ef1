"""Writing by index: exactly, where the index is known; anywhere along the axis, where it is computed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from meshwright.compiler.causality.call import Call
from meshwright.compiler.causality.candidates import expand_masks
from meshwright.compiler.causality.listings import steady
from meshwright.compiler.causality.registry import replacement, rule
from meshwright.compiler.causality.shadow import CHOICE, Shadow, constant
from meshwright.compiler.causality.typed import joint_shape, put
from meshwright.compiler.causality.words import any_over, softened

Put = Callable[[Tensor, Tensor], Tensor]
"""From the base and the values to the base with the values written, both of any dtype, with a dim of words or not."""


def written(
    call: Call, base: Tensor, values: Shadow, value: Tensor, where: list[Tensor | None], index: Shadow, adds: bool
) -> Shadow:
    """``base`` with ``values`` written at integer indices; ``values`` and ``index`` have the shape of what is written.

    ``index`` joins all indices: what decides the place of each value.
    """
    start = call.settled(base)
    listings = call.interpreter.listings
    item = index.item
    loose = not bool(index.known.all())
    ranks: Tensor | None = None
    if item is not None:
        whole = listings.complete(item)
        if values.item is not None and not torch.equal(values.item, item):
            values = listings.settle(values, value)
        if values.item is None:
            rows = listings.row_dims(item)
            if not steady(values, value, rows, value.shape):
                if bool(values.known.all()) and _counts(value, rows):
                    ranks = item
                    union = softened(listings.order_of(item)).expand(*value.shape, call.width)
                    values = Shadow(values.known & False, union)
                else:
                    union = softened(any_over(call.words(values).reshape(-1, call.width), (0,)))
                    union = union | listings.order_of(item)
                    values = Shadow(values.known & False, union.expand(*value.shape, call.width))
        if not whole:
            loose = True
            index = Shadow(index.known & False, call.words(index) | softened(listings.order_of(item)))
    elif values.item is not None:
        values = listings.settle(values, value)
    if loose:
        return _anywhere(call, start, base, values, value, where, index, adds)
    return _exactly(call, start, base, values, where, index, adds, ranks)


def _counts(value: Tensor, rows: list[int]) -> bool:
    """Whether the values are 0, 1, 2, ... along the rows."""
    if len(rows) != 1 or value.is_floating_point():
        return False
    line = torch.arange(value.shape[rows[0]]).reshape([-1 if d == rows[0] else 1 for d in range(value.dim())])
    return bool((value == line).all())


def _exactly(
    call: Call,
    start: Shadow,
    base: Tensor,
    values: Shadow,
    where: list[Tensor | None],
    index: Shadow,
    adds: bool,
    ranks: Tensor | None,
) -> Shadow:
    ones = torch.ones(values.known.shape, dtype=torch.bool)
    hit = put(torch.zeros(base.shape, dtype=torch.bool), where, ones)
    # known: of several values for one place, all
    spoiled = put(torch.zeros(base.shape, dtype=torch.float32), where, (~values.known).float(), True) > 0
    twice = put(torch.zeros(base.shape, dtype=torch.float32), where, ones.float(), True) > 1
    known = torch.where(hit, ~spoiled & (start.known if adds else ~twice), start.known)
    deps = None
    if start.deps is not None or values.deps is not None or index.deps is not None:
        kept = call.words(start)
        if not adds and index.deps is None:  # otherwise the row may not be there, and nothing is written
            kept = torch.where(hit.unsqueeze(-1), 0, kept)
        brought = call.words(values) | call.words(index)
        deps = kept | _or_into(base.shape, where, brought)
    rank = None
    if ranks is not None:
        rank = put(torch.zeros(base.shape, dtype=torch.int32), where, ranks)
    trait = None
    if values.trait is not None and not adds:
        trait = put(torch.zeros(base.shape, dtype=torch.uint8), where, values.trait)
    return Shadow(known, deps, None, rank, trait)


def _or_into(shape: torch.Size, where: list[Tensor | None], words: Tensor) -> Tensor:
    """The union of sets ``[*written, words]`` by place."""
    numbers = torch.arange(shape.numel()).reshape(shape)
    places = torch.ops.aten.index.Tensor(numbers, where).expand(words.shape[:-1]).reshape(-1)
    flat = words.reshape(-1, words.shape[-1])
    made = torch.zeros((shape.numel(), words.shape[-1]), dtype=torch.int64)
    order = places.argsort(stable=True)
    places, flat = places[order], flat[order]
    while places.numel():
        first = torch.ones_like(places, dtype=torch.bool)
        first[1:] = places[1:] != places[:-1]
        made[places[first]] |= flat[first]
        places, flat = places[~first], flat[~first]
    return made.reshape(*shape, -1)


def _anywhere(
    call: Call,
    start: Shadow,
    base: Tensor,
    values: Shadow,
    value: Tensor,
    where: list[Tensor | None],
    index: Shadow,
    adds: bool,
) -> Shadow:
    """Along dims whose index is computed each place may get any of the values."""
    del value, adds
    half = call.width // 2
    brought = call.words(index) | softened(call.words(values))
    per_index = index.known
    if not bool(per_index.all()):
        brought = brought.clone()
    spread = _or_into(base.shape, where, brought)
    dims = [d for d, one in enumerate(where) if one is not None and not _is_grid(one, d, len(where))]
    spread = any_over(spread, dims, keepdim=True).expand(spread.shape)
    deps = call.words(start) | spread
    constant_values = bool(values.known.all()) and values.deps is None and bool((start.known & (base == 0)).all())
    trait = torch.tensor(CHOICE, dtype=torch.uint8).expand(base.shape) if constant_values else None
    touched = any_over(spread, (), keepdim=True)[..., :half].any(-1) if half else None
    known = start.known if touched is None else start.known & ~_reached(base.shape, where, dims)
    return Shadow(known, deps, None, None, trait)


def _reached(shape: torch.Size, where: list[Tensor | None], dims: list[int]) -> Tensor:
    written_shape = torch.ops.aten.index.Tensor(torch.zeros(shape, dtype=torch.float32), where).shape
    hit = put(torch.zeros(shape, dtype=torch.bool), where, torch.ones(written_shape, dtype=torch.bool))
    for dim in dims:
        hit = hit.any(dim, keepdim=True)
    return hit.expand(shape)


def _is_grid(one: Tensor, dim: int, dims: int) -> bool:
    """Whether an index is the place itself along a dim of its own, as in a scatter."""
    if one.dim() != dims:
        return False
    line = torch.arange(one.shape[dim]).reshape([-1 if d == dim else 1 for d in range(dims)])
    return bool((one == line).all()) and one.numel() == one.shape[dim]


@replacement("aten.index_put", "aten._unsafe_index_put")
def index_put(call: Call) -> Any:
    """``self[i, j, ...] = values``."""
    return _index_put(call, call["self"], call["values"], bool(call.get("accumulate", False)))


@replacement("aten.index_put_", "aten._index_put_impl_")
def index_put_in_place(call: Call) -> Any:
    """Likewise, in place."""
    made = _index_put(call, call["self"], call["values"], bool(call.get("accumulate", False)))
    out, shadow = made
    call["self"].copy_(out)
    call.interpreter.memory.write(call["self"], shadow)
    return call["self"]


def _index_put(call: Call, base: Tensor, value: Tensor, adds: bool) -> tuple[Tensor, Shadow]:
    masks = [one for one in call["indices"] if one is not None and one.dtype in (torch.bool, torch.uint8)]
    made = expand_masks(call, call["indices"], base)
    assert made is not None
    where, shadows = made
    shape = torch.ops.aten.index.Tensor(base, where).shape
    used = [s for s in shadows if s is not None]
    values = [i for i in where if i is not None]
    broad = joint_shape(*(i.shape for i in values))
    joined, item = call.interpreter.listings.joined(
        [s.expand(broad) for s in used], [i.expand(broad) for i in values], broad
    )
    index = Shadow(constant(broad).known, None, item)
    for shadow in joined:
        deps = index.deps
        if shadow.deps is not None:
            deps = shadow.deps if deps is None else deps | shadow.deps
        index = Shadow(index.known & shadow.known, deps, item)
    dims = [d for d, one in enumerate(where) if one is not None]
    place = dims[0] if dims == list(range(dims[0], dims[0] + len(dims))) else 0
    inner = [1] * (len(shape) - place - len(broad))
    index = index.map(
        lambda x: x.reshape(*[1] * place, *broad, *inner),
        lambda x: x.reshape(*[1] * place, *broad, *inner, call.width),
    ).expand(shape)
    given = value.to(base.dtype).expand(shape)
    made_shadow = written(call, base, call.shadow(value).expand(shape), given, where, index, adds)
    if masks and not bool(index.known.all() and index.deps is None):
        truth = torch.ops.aten.index.Tensor(masks[0], where[: masks[0].dim()]) if masks[0].dim() == len(where) else None
        if truth is not None:
            kept = torch.ops.aten.index.Tensor(base, where)
            truth = truth.reshape(*truth.shape, *[1] * (kept.dim() - truth.dim()))
            given = torch.where(truth != 0, given + kept if adds else given, kept)
            return put(base, where, given), made_shadow
    return put(base, where, given, adds), made_shadow


@rule("aten.scatter", "aten.scatter_add", "aten.scatter_reduce")
def scatter(call: Call) -> Shadow:
    """Along one dim, each other dim place by place."""
    base, places = call["self"], call["index"]
    value = call.get("src", call.get("value"))
    adds = "scatter_add" in call.name or call.get("reduce") is not None
    if base.dim() == 0:
        return call.settled(base)
    if isinstance(value, Tensor) and value.dim():
        given = value[tuple(slice(0, n) for n in places.shape)]
        cut = tuple(slice(0, n) for n in places.shape)
        shadow = call.shadow(value).map(lambda x: x[cut])
    else:
        number = value if isinstance(value, Tensor) else torch.tensor(value)
        given, shadow = number.expand(places.shape), call.shadow(value).expand(places.shape)
    dim = call["dim"] % base.dim()
    where: list[Tensor | None] = []
    for d in range(base.dim()):
        if d == dim:
            where.append(places)
        else:
            where.append(torch.arange(places.shape[d]).reshape([-1 if k == d else 1 for k in range(base.dim())]))
    if places.numel() == 0:
        return call.shadow(base).plain()
    if call["self"].shape[dim] and call.shadow(places).deps is not None:
        call.interpreter.notes.rows.add(base.shape[dim])
    return written(call, base, shadow, given, where, call.shadow(places), adds)


@rule("aten.index_add", "aten.index_copy", "aten.index_reduce", "aten.index_fill")
def index_add(call: Call) -> Shadow:
    """Slices along one dim."""
    base, places = call["self"], call["index"].reshape(-1)
    value = call.get("source", call.get("value"))
    dim = call["dim"] % max(base.dim(), 1)
    shape = list(base.shape)
    if base.dim() == 0:
        return call.settled(base)
    shape[dim] = places.numel()
    number = value if isinstance(value, Tensor) else torch.tensor(value)
    given, shadow = number.expand(shape), call.shadow(value).expand(shape)
    line = [-1 if d == dim else 1 for d in range(base.dim())]
    index = call.shadow(call["index"]).map(lambda x: x.reshape(-1), lambda x: x.reshape(-1, call.width))
    index = index.map(lambda x: x.reshape(line), lambda x: x.reshape(*line, call.width)).expand(shape)
    where: list[Tensor | None] = [None] * dim + [places.long()]
    return written(call, base, shadow, given, where, index, "add" in call.name or "reduce" in call.name)


@replacement("aten.masked_scatter")
def masked_scatter(call: Call) -> Any:
    """Places of the mask get the source's elements one after another."""
    base, mask, source = call["self"], call["mask"].expand(call["self"].shape), call["source"]
    shadow = call.settled(mask)
    out = torch.ops.aten.masked_scatter.default(base, call["mask"], source) if _enough(mask, source) else base.clone()
    own, given = call.settled(base), call.settled(source)
    union = softened(any_over(call.words(given).reshape(-1, call.width), (0,)))
    choice = softened(any_over(call.words(shadow).reshape(-1, call.width), (0,)))
    if bool(shadow.known.all()) and shadow.deps is None:
        count = int(mask.sum())
        deps = call.words(own).clone()
        deps[mask] = call.words(given).reshape(-1, call.width)[:count]
        known = own.known.clone()
        known[mask] = given.known.reshape(-1)[:count]
        return out, Shadow(known, deps)
    candidates = int((mask | ~shadow.known).sum())
    if source.numel() == candidates:  # the rows of the same mask, in its order
        rows = (mask | ~shadow.known).nonzero()
        brought = _or_into(base.shape, list(rows.unbind(1)), call.words(given).reshape(-1, call.width))
        return out, Shadow(own.known & False, call.words(own) | brought | call.words(shadow))
    return out, Shadow(own.known & False, call.words(own) | call.words(shadow) | union | choice)


def _enough(mask: Tensor, source: Tensor) -> bool:
    return source.numel() >= int(mask.sum())
