"""Inputs of another number of rows and positions, like those given."""

from __future__ import annotations

import torch
from torch import Tensor

from meshwright.compiler.causality.feed import Feed, Leaf, Role, Unfit
from meshwright.compiler.causality.typed import distinct


def resized(
    feed: Feed, rows: int, length: int, vocabulary: dict[int, int], seed: int, documents: int | None = None
) -> Feed:
    """Tokens drawn anew; masks and positions as given, cut or continued. Raises Unfit where that has no answer.

    ``documents`` is how many a row is of where they are made anew; three or four, if it is None.

    ``vocabulary`` says for the number of a leaf below which number its tokens are; others come from those given.
    """
    drawing = torch.Generator().manual_seed(seed)
    same = rows == feed.rows and length == feed.length
    segments = None
    if feed.segments is not None:
        segments = feed.segments if same else _segments(feed, rows, length, documents)
    values = []
    for number, leaf in enumerate(feed.leaves):
        if number == feed.segments_leaf and segments is not None:
            values.append(_like(segments, leaf.value, feed))
        elif leaf.role is Role.TOKENS:
            shape = _shape(leaf.value, feed, rows, length)
            values.append(drawn(leaf, shape, vocabulary.get(number), drawing))
        elif same:
            values.append(leaf.value)
        elif leaf.role is Role.CONTEXT:
            assert feed.batch_dim is not None
            values.append(_rows(leaf.value, feed.batch_dim, rows))
        else:
            values.append(_given(leaf, feed, rows, length, segments))
    return feed.with_values(values, rows, length, segments)


def drawn(leaf: Leaf, shape: list[int], vocabulary: int | None, drawing: torch.Generator) -> Tensor:
    """Tokens of a shape, like those of a leaf."""
    value = leaf.value
    if value.is_floating_point() or value.is_complex():
        wide = value.double() if value.is_floating_point() else value.real.double()
        spread = float(wide.std()) if value.numel() > 1 else 1.0
        spread = spread if 0 < spread < float("inf") else 1.0
        return torch.randn(shape, generator=drawing, dtype=torch.float64).mul(spread).to(value.dtype)
    known = distinct(value)
    if vocabulary is None:
        return known[torch.randint(known.numel(), shape, generator=drawing)].to(value.dtype)
    return torch.randint(int(min(0, int(known.min()))), vocabulary, shape, generator=drawing).to(value.dtype)


def _segments(feed: Feed, rows: int, length: int, documents: int | None) -> Tensor:
    """Documents for another size: new ones, if no other input goes with those given, which else are cut."""
    given = feed.segments
    assert given is not None
    alone = feed.segments_leaf is not None
    for number, leaf in enumerate(feed.leaves):
        if leaf.role is Role.GIVEN and number != feed.segments_leaf and leaf.value.dim() > 1:
            restarts = leaf.value.shape == given.shape and torch.equal(leaf.value.long(), positions_in(given).long())
            steady = bool((leaf.value == leaf.value.flatten()[0]).all())
            alone = alone and (restarts or steady)
    if alone:
        return segmented(given, rows, length, documents)
    if length > feed.length or documents is not None:
        raise Unfit("the documents cannot be continued")
    return _rows(given, 0, rows)[:, :length]


def segmented(given: Tensor, rows: int, length: int, documents: int | None = None) -> Tensor:
    """Ids of documents: three or more in a row, cut at other places in each."""
    first = int(given.min())
    made = torch.zeros((rows, length), dtype=given.dtype)
    pieces = documents or (3 if length < 24 else 4)
    for row in range(rows):
        cuts = sorted({max(1, length * k // pieces + (row % 3) - 1) for k in range(1, pieces)})
        for cut in cuts:
            made[row, cut:] += 1
    return made + max(first, 0)


def positions_in(segments: Tensor) -> Tensor:
    """The position of each token within its document."""
    made = torch.zeros_like(segments)
    for t in range(1, segments.shape[1]):
        made[:, t] = torch.where(segments[:, t] == segments[:, t - 1], made[:, t - 1] + 1, 0)
    return made


def _like(segments: Tensor, value: Tensor, feed: Feed) -> Tensor:
    made = segments.transpose(0, 1) if feed.batch_dim == 1 and feed.time_dim == 0 else segments
    return made[0] if value.dim() == 1 else made


def _shape(value: Tensor, feed: Feed, rows: int, length: int) -> list[int]:
    shape = list(value.shape)
    shape[feed.time_dim] = length
    if feed.batch_dim is not None:
        shape[feed.batch_dim] = rows
    return shape


def _rows(value: Tensor, dim: int, rows: int) -> Tensor:
    return value.index_select(dim, torch.arange(rows) % value.shape[dim])


def _given(leaf: Leaf, feed: Feed, rows: int, length: int, segments: Tensor | None) -> Tensor:
    """A mask or positions for another size."""
    value = leaf.value
    if segments is not None and feed.segments is not None and value.shape == feed.segments.shape:
        restart = torch.equal(value.long(), positions_in(feed.segments).long())
        if restart:
            return positions_in(segments).to(value.dtype)
    batched = feed.batch_dim is not None and value.dim() > 1 and value.shape[0] in (feed.rows, 1)
    dims = [d for d in range(1 if batched else 0, value.dim()) if value.shape[d] == feed.length]
    if batched and value.shape[0] == feed.rows and feed.rows != rows:
        value = _rows(value, 0, rows)
    for dim in dims:
        value = _along(value, dim, length, len(dims))
    return value


def _along(value: Tensor, dim: int, length: int, dims: int) -> Tensor:
    count = value.shape[dim]
    if length <= count:
        return value.narrow(dim, 0, length)
    last = value.narrow(dim, count - 1, 1)
    extra = length - count
    if bool((value == last).all()) or (dims == 1 and value.dtype == torch.bool):
        return torch.cat([value, last.expand([extra if d == dim else s for d, s in enumerate(value.shape)])], dim)
    steps = value.diff(dim=dim) if value.dtype != torch.bool else None
    if steps is not None and bool((steps == 1).all()):
        line = torch.arange(1, extra + 1).reshape([-1 if d == dim else 1 for d in range(value.dim())])
        return torch.cat([value, last + line.to(value.dtype)], dim)
    if dims == 1:
        return torch.cat([value, last.expand([extra if d == dim else s for d, s in enumerate(value.shape)])], dim)
    raise Unfit("a mask of two time dims cannot be made longer")
