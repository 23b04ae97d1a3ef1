"""Between whole tensors and the shards of ranks: which elements a rank holds, and where.

A dimension is a product of segments (see :mod:`meshwright.compiler.mesh`), so a shard is a
product of intervals of segments: :func:`take_shard` views every segment as a dimension of its
own, narrows it and pads it with zeros; :func:`assemble` does the reverse. The sequential axis
``micro`` is an axis like the others here: give a mesh and coordinates that have it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from meshwright.compiler.diagnostics import InternalError
from meshwright.compiler.mesh import Dim, Mesh, Sharding

Coordinates = Mapping[str, int]
Shards = Callable[[Coordinates], Tensor]
"""Gives the shard at some coordinates of the axes that the sharding names."""


def take_shard(whole: Tensor, sharding: Sharding, mesh: Mesh, coordinates: Coordinates) -> Tensor:
    """The shard at the coordinates, padded with zeros to the local shape; always memory of its own.

    ``whole`` has the shape ``sharding.shape``. Owed sums are not looked at.
    """
    if tuple(whole.shape) != sharding.shape:
        raise InternalError(f"a tensor of shape {tuple(whole.shape)} does not fit {sharding}")
    x = whole.reshape([s.size for _, _, s in sharding.segments()])
    for d, (_, _, segment) in enumerate(sharding.segments()):
        start, valid = segment.bounds(mesh, coordinates)
        x = x.narrow(d, min(start, segment.size), valid)
    expanded = sharding.expanded_shape(mesh)
    if tuple(x.shape) != expanded:
        padded = x.new_zeros(expanded)
        padded[tuple(slice(n) for n in x.shape)] = x
        x = padded
    local = x.reshape(sharding.local_shape(mesh))
    return local.clone() if _same_memory(local, whole) else local.contiguous()


def assemble(
    shards: Shards | Mapping[tuple[int, ...], Tensor],
    sharding: Sharding,
    mesh: Mesh,
    *,
    replicas: bool = False,
) -> Tensor:
    """The whole tensor from its shards; the inverse of :func:`take_shard`.

    ``shards`` gives the shard at coordinates; a mapping has the coordinates of all axes of the
    mesh, in its order, as keys. Copies along axes that neither cut nor owe anything are taken
    from coordinate 0, or with ``replicas`` compared bit by bit (InternalError where they differ).
    Owed reductions are paid, in the order of coordinates.
    """
    get = _lookup(shards, mesh) if isinstance(shards, Mapping) else shards
    cutting = [a for a in mesh.names if a in sharding.axes]
    whole: Tensor | None = None
    for chosen in _points(mesh, cutting):
        shard = _paid(get, sharding, mesh, {**dict.fromkeys(mesh.names, 0), **chosen}, replicas)
        if whole is None:
            whole = shard.new_empty([s.size for _, _, s in sharding.segments()])
        place, source = [], []
        for _, _, segment in sharding.segments():
            start, valid = segment.bounds(mesh, chosen)
            place.append(slice(start, start + valid))
            source.append(slice(valid))
        whole[tuple(place)] = shard.reshape(sharding.expanded_shape(mesh))[tuple(source)]
    assert whole is not None
    return whole.reshape(sharding.shape)


def _lookup(table: Mapping[tuple[int, ...], Tensor], mesh: Mesh) -> Shards:
    return lambda coordinates: table[tuple(coordinates[a] for a in mesh.names)]


def _paid(get: Shards, sharding: Sharding, mesh: Mesh, at: dict[str, int], replicas: bool) -> Tensor:
    """One shard with its owed reductions paid and, if asked, its copies compared."""
    reductions = {reduction for _, reduction in sharding.partial}
    if len(reductions) > 1:
        raise InternalError(f"{sharding} owes reductions of several kinds, whose order is not known")
    owed = [a for a in mesh.names if a in sharding.owed]
    free = [a for a in mesh.names if a not in sharding.axes and a not in sharding.owed]
    result: Tensor | None = None
    for copy in _points(mesh, free if replicas else []):
        parts = [get({**at, **copy, **c}) for c in _points(mesh, owed)]
        value = reduce_in_order(parts, *reductions) if reductions else parts[0]
        if result is None:
            result = value
        elif not bool(((result == value) | ((result != result) & (value != value))).all()):
            raise InternalError(f"copies of a tensor that lies as {sharding} differ at { ({**at, **copy}) }")
    assert result is not None
    return result


def reduce_in_order(values: list[Tensor], reduction: str) -> Tensor:
    """The reduction of equal shapes, from the first to the last, so that it is the same each time."""
    total = values[0].clone()
    for value in values[1:]:
        if reduction == "sum":
            total += value
        elif reduction == "max":
            total = torch.maximum(total, value)
        elif reduction == "min":
            total = torch.minimum(total, value)
        elif reduction == "logsumexp":
            total = torch.logaddexp(total, value)
        else:
            raise InternalError(f"unknown reduction '{reduction}'")
    return total


def positions(dim: Dim, mesh: Mesh, coordinates: Coordinates) -> Tensor:
    """The whole tensor's index of every local position of a dim; -1 where it is padding."""
    result = torch.zeros(1, dtype=torch.int64)
    for segment in dim:
        start, valid = segment.bounds(mesh, coordinates)
        own = torch.full((segment.local(mesh),), -1, dtype=torch.int64)
        own[:valid] = torch.arange(start, start + valid)
        joined = result[:, None] * segment.size + own[None, :]
        result = torch.where((result[:, None] < 0) | (own[None, :] < 0), -1, joined).flatten()
    return result


@dataclass(frozen=True)
class Box:
    """A contiguous block of a shard: where it starts in the whole and in the shard, and its size."""

    whole: tuple[int, ...]
    local: tuple[int, ...]
    size: tuple[int, ...]

    def view(self, shard: Tensor) -> Tensor:
        """The block as a view of the shard."""
        for d, (start, length) in enumerate(zip(self.local, self.size, strict=True)):
            shard = shard.narrow(d, start, length)
        return shard


def boxes(sharding: Sharding, mesh: Mesh, coordinates: Coordinates) -> Iterator[Box]:
    """The blocks of which a shard consists, without its padding. A whole scalar is one empty box."""
    runs = [_runs(positions(dim, mesh, coordinates)) for dim in sharding.dims]
    for parts in itertools.product(*runs):
        yield Box(tuple(p[0] for p in parts), tuple(p[1] for p in parts), tuple(p[2] for p in parts))


def _runs(index: Tensor) -> list[tuple[int, int, int]]:
    """``(start in the whole, start in the shard, length)`` of the contiguous runs."""
    local = torch.nonzero(index >= 0).flatten()
    whole = index[local]
    if not local.numel():
        return []
    breaks = torch.nonzero((whole.diff() != 1) | (local.diff() != 1)).flatten() + 1
    first = [0, *breaks.tolist()]
    lengths = [b - a for a, b in zip(first, [*first[1:], local.numel()], strict=True)]
    return list(zip(whole[first].tolist(), local[first].tolist(), lengths, strict=True))


def holder(name_hash: int, sharding: Sharding, mesh: Mesh) -> dict[str, int]:
    """Which of the equal copies of a tensor is written out: coordinates on the axes that do not cut it.

    ``name_hash`` spreads different tensors over different copies.
    """
    result = {}
    for axis, size in mesh.axes:
        if axis not in sharding.axes:
            result[axis] = name_hash % size
            name_hash //= size
    return result


def _points(mesh: Mesh, axes: list[str]) -> Iterator[dict[str, int]]:
    for values in itertools.product(*(range(mesh.size(a)) for a in axes)):
        yield dict(zip(axes, values, strict=True))


def _same_memory(a: Tensor, b: Tensor) -> bool:
    return a.numel() > 0 and a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()
