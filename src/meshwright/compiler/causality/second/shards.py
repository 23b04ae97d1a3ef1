"""What a rank's part of an output sees, by the places that its elements have in the whole."""

from __future__ import annotations

import math
from collections.abc import Mapping

from meshwright.compiler.causality.second.opinion import Opinion
from meshwright.compiler.causality.second.seen import SAME, Seen, Span
from meshwright.compiler.mesh import Dim, Mesh, Sharding, split

EVERYWHERE: Span = (-math.inf, math.inf)
Place = tuple[int | None, int, int]
"""A part of a tensor (none where a rank holds but one index), which index of the whole its first one is, and how many
it has."""


def shard_opinion(seen: Seen, sharding: Sharding, mesh: Mesh, at: Mapping[str, int], rows: int) -> Opinion:
    """Of an output of which a rank at some coordinates holds a shard: the first dims of the whole are rows and
    positions, or their product. Intervals are those of local indices; what counts is their distance in the whole."""
    if not seen.depends:
        return Opinion("CAUSAL", SAME)
    places = _places(seen, sharding, mesh, at, rows)
    if places is None:
        return Opinion("not shown", EVERYWHERE, "it does not lie by rows and positions")
    rows_of, times_of = places
    span = seen.time.within(*times_of) or SAME
    apart = (seen.row.within(*rows_of) or SAME) == SAME
    if span[1] <= 0 and apart:
        return Opinion("CAUSAL", span)
    return Opinion("LEAK" if seen.exact else "not shown", span, "" if apart else "rows are joined")


def strays(seen: Seen, sharding: Sharding, mesh: Mesh, at: Mapping[str, int]) -> bool:
    """Whether a shard of any tensor is known to see a later position than its own, or other rows, or is not known to
    see only some."""
    if seen.time.anywhere or seen.row.anywhere or (seen.row.fixed or SAME)[0] != (seen.row.fixed or SAME)[1]:
        return True
    starts: dict[int, int] = {}
    for numbers, dim in zip(seen.parts(), sharding.dims, strict=True):
        run = _run(dim, mesh, at)
        if len(numbers) == 1 and run is not None:
            starts[numbers[0]] = run[0]
    later = any(span[1] > starts[part] for part, span in seen.time.spans.items() if part in starts)
    rows = any(span != (starts[part],) * 2 for part, span in seen.row.spans.items() if part in starts)
    return later or rows


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
    runs = [_run(dim, mesh, at) for dim in factors]
    if any(run is None for run in runs) or [run[1] for run in runs if run is not None and run[1] > 1] != sizes:
        return None
    numbers = iter(range(len(sizes)))
    row, time = [(next(numbers) if n > 1 else None, start, n) for start, n in (run for run in runs if run is not None)]
    return row, time


def _run(dim: Dim, mesh: Mesh, at: Mapping[str, int]) -> tuple[int, int] | None:
    """Which indices of a dim a rank holds: from one on, how many, padding included. None: not one stretch of them."""
    start, count = 0, 1
    for segment in dim:
        if count > 1 and segment.local(mesh) != segment.size:
            return None
        start, count = start * segment.size + segment.bounds(mesh, at)[0], count * segment.local(mesh)
    return start, count
