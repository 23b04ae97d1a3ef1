"""What a rank's part of an output sees, by the places that its elements have in the whole."""

from __future__ import annotations

import math
from collections.abc import Mapping

from meshwright.compiler.causality.second.opinion import Opinion
from meshwright.compiler.causality.second.seen import Along, Seen, Span
from meshwright.compiler.mesh import Dim, Mesh, Sharding, split

EVERYWHERE: Span = (-math.inf, math.inf)
Place = tuple[int | None, int]
"""A part of a tensor (none where a rank holds but one index), and which index of the whole its first one is."""


def shard_opinion(seen: Seen, sharding: Sharding, mesh: Mesh, at: Mapping[str, int], rows: int) -> Opinion:
    """Of an output of which a rank at some coordinates holds a shard: the first dims of the whole are rows and
    positions, or their product. Intervals are those of local indices; what counts is their distance in the whole."""
    if not seen.depends:
        return Opinion("CAUSAL", (0, 0))
    places = _places(seen, sharding, mesh, at, rows)
    if places is None:
        return Opinion("not shown", EVERYWHERE, "it does not lie by rows and positions")
    (row, first_row), (time, first) = places
    span = _within(seen.time, time, first)
    apart = _within(seen.row, row, first_row) == (0, 0)
    if span[1] <= 0 and apart:
        return Opinion("CAUSAL", span)
    return Opinion("LEAK" if seen.exact else "not shown", span, "" if apart else "rows are joined")


def strays(seen: Seen, sharding: Sharding, mesh: Mesh, at: Mapping[str, int]) -> bool:
    """Whether a shard of any tensor is known to see a later position than its own, or other rows, or is not known to
    see only some."""
    if seen.time.anywhere or seen.row.anywhere:
        return True
    starts: dict[int, int] = {}
    for numbers, dim in zip(seen.parts(), sharding.dims, strict=True):
        segments = [segment for segment in dim if segment.size > 1]
        if len(numbers) == len(segments) == 1:
            starts[numbers[0]] = segments[0].bounds(mesh, at)[0]
    later = any(span[1] > starts[part] for part, span in seen.time.spans.items() if part in starts)
    rows = any(span != (starts[part],) * 2 for part, span in seen.row.spans.items() if part in starts)
    return later or rows


def _within(along: Along, part: int | None, start: int) -> Span:
    """On which interval around an element's place in the whole it depends, along one coordinate of the tokens."""
    if along.anywhere or any(other != part for other in along.spans):
        return EVERYWHERE
    if part is None or part not in along.spans:
        return (0, 0)
    low, high = along.spans[part]
    return low - start, high - start


def _places(seen: Seen, sharding: Sharding, mesh: Mesh, at: Mapping[str, int], rows: int) -> tuple[Place, Place] | None:
    """Where rows and positions are. None: the shard is no product of them."""
    shape, dims = sharding.shape, sharding.dims
    if shape[0] == rows and len(dims) > 1:
        factors: tuple[Dim, ...] | None = dims[:2]
        sizes = [*seen.dims[0], *seen.dims[1]]
    else:
        factors, sizes = split(dims[0], (rows, shape[0] // rows), mesh), list(seen.dims[0])
    if factors is None:
        return None
    segments = [[segment for segment in dim if segment.size > 1] or list(dim[:1]) for dim in factors]
    local = [[segment.local(mesh) for segment in own] for own in segments]
    if any(len(own) != 1 for own in segments) or [n for (n,) in local if n > 1] != sizes:
        return None
    numbers = iter(range(len(sizes)))
    row, time = [
        (next(numbers) if n > 1 else None, s.bounds(mesh, at)[0]) for (n,), (s,) in zip(local, segments, strict=True)
    ]
    return row, time
