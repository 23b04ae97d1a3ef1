"""The sequential axis ``micro`` in local tensors: take one microbatch's part, join all parts.

Prologue values lie on the device mesh alone and are computed once for all rows of a rank;
``micro`` reads them cut by the sequential axis too. In the other direction, an output of ``micro`` that is
cut by the axis comes in parts, one per microbatch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from meshwright.compiler.diagnostics import InternalError
from meshwright.compiler.mesh import MICRO, Dim, Mesh, Segment, Sharding, join, split
from meshwright.runtime.layout import Coordinates, take_shard


def slice_microbatch(local: Tensor, source: Sharding, target: Sharding, mesh: Mesh, coordinates: Coordinates) -> Tensor:
    """This microbatch's part of a local tensor that lies as ``source``, laid as ``target``.

    ``mesh`` and ``coordinates`` have the axis ``micro``. The two shardings must agree in all
    other axes; a tensor that every rank holds whole may be cut in any way.
    """
    if MICRO not in target.axes:
        return local
    if not source.axes:
        return take_shard(local, target.paid(), mesh, coordinates)
    shape: list[int] = []
    for before, after in zip(source.dims, target.dims, strict=True):
        isolated = isolate(after, mesh)
        parts = split(before, tuple(s.size for s in isolated), mesh)
        wanted = [(Segment(s.size, _rest(s)),) for s in isolated]
        if parts is None or [join(p, mesh) for p in parts] != wanted:
            raise InternalError(f"a prologue value lies as {source}, of which {target} is not a part on each rank")
        shape.extend(s.local(mesh) * (mesh.size(MICRO) if MICRO in s.axes else 1) for s in isolated)
    x = local.reshape(shape)
    flat = [s for dim in target.dims for s in isolate(dim, mesh)]
    for d, segment in enumerate(flat):
        if MICRO in segment.axes:
            x = x.narrow(d, coordinates[MICRO], 1)
    return x.reshape(target.local_shape(mesh))


def join_microbatches(parts: Sequence[Tensor], sharding: Sharding, mesh: Mesh) -> tuple[Tensor, Sharding]:
    """The parts of all microbatches as one local tensor, and how that lies without ``micro``."""
    dims = tuple(isolate(dim, mesh) for dim in sharding.dims)
    isolated = Sharding(dims, sharding.partial)
    (at,) = (i for i, (_, _, s) in enumerate(isolated.segments()) if MICRO in s.axes)
    joined = torch.cat([p.reshape(isolated.expanded_shape(mesh)) for p in parts], dim=at)
    rest = Sharding(tuple(tuple(Segment(s.size, _rest(s)) for s in dim) for dim in dims), sharding.partial)
    return joined.reshape(rest.local_shape(mesh)), rest


def isolate(dim: Dim, mesh: Mesh) -> Dim:
    """The dim with ``micro``, where it cuts, on a segment of its own: ``8@micro@data`` as ``2@micro*4@data``."""
    result: list[Segment] = []
    for segment in dim:
        count = mesh.size(MICRO)
        if MICRO not in segment.axes or (segment.axes == (MICRO,) and segment.size == count):
            result.append(segment)
        elif segment.axes[0] == MICRO and segment.size % count == 0:
            result.extend((Segment(count, (MICRO,)), Segment(segment.size // count, _rest(segment))))
        else:
            raise InternalError(f"'{segment}' cannot be cut into {count} microbatches of equal size")
    assert math.prod(s.size for s in result) == math.prod(s.size for s in dim)
    return tuple(result)


def _rest(segment: Segment) -> tuple[str, ...]:
    return tuple(a for a in segment.axes if a != MICRO)
