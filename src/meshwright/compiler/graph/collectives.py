"""The communication ops of a rank program: plain functions that an FX graph calls.

Each asks the current :class:`Communicator` (set by whoever runs the program) to do the work, so
the same program runs under ``torch.distributed`` and in the virtual cluster. ``dim`` counts the
dims of the tensor as given; sizes are local unless said otherwise.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Protocol

import torch
from torch import Tensor

from meshwright.compiler.mesh import Mesh, Segment, ceil_div


class Communicator(Protocol):
    """What a rank needs in order to run its program."""

    mesh: Mesh
    """The device mesh, with the sequential axis ``micro`` in front."""

    def coordinate(self, axis: str) -> int:
        """This rank's coordinate (for ``micro``: the microbatch that is being run)."""
        ...

    def all_reduce(self, x: Tensor, axes: tuple[str, ...], reduction: str) -> Tensor:
        """The reduction over the axes. ``x`` is contiguous and may be overwritten."""
        ...

    def all_reduce_all(self, xs: list[Tensor], axes: tuple[str, ...], reduction: str) -> list[Tensor]:
        """The reductions of several tensors, begun together. All are contiguous and may be overwritten."""
        ...

    def all_gather(self, x: Tensor, axes: tuple[str, ...]) -> Tensor:
        """``[n, ...] -> [k n, ...]``: concatenated along dim 0, first axis outermost."""
        ...

    def reduce_scatter(self, x: Tensor, axes: tuple[str, ...]) -> Tensor:
        """``[k n, ...] -> [n, ...]``: the sum, cut along dim 0."""
        ...

    def all_to_all(self, x: Tensor, axes: tuple[str, ...]) -> Tensor:
        """``[k n, ...] -> [k n, ...]``: chunk j of dim 0 goes to rank j of the group."""
        ...


_current: ContextVar[Communicator] = ContextVar("communicator")


@contextlib.contextmanager
def use(communicator: Communicator) -> Iterator[None]:
    """Run a rank program under this communicator."""
    token = _current.set(communicator)
    try:
        yield
    finally:
        _current.reset(token)


def current() -> Communicator:
    return _current.get()


def all_reduce(x: Tensor, axes: tuple[str, ...], reduction: str = "sum") -> Tensor:
    """Pay an owed ``sum``, ``max``, ``min`` or ``logsumexp`` over the axes."""
    here = current()
    if reduction == "logsumexp":
        # log(sum(exp)) of the shards' values, shifted by their maximum so that nothing overflows
        top = here.all_reduce(_copy(x), axes, "max")
        shift = torch.where(torch.isfinite(top), top, torch.zeros_like(top))
        return shift + torch.log(here.all_reduce(torch.exp(x - shift), axes, "sum"))
    return here.all_reduce(_copy(x), axes, reduction)


def _copy(x: Tensor) -> Tensor:
    return x.clone(memory_format=torch.contiguous_format)


def all_gather(x: Tensor, dim: int, axes: tuple[str, ...], size: int) -> Tensor:
    """The chunks along ``dim`` joined over the axes, padding beyond ``size`` cut away."""
    here = current()
    x = x.movedim(dim, 0).contiguous()
    segment = Segment(size, axes)
    if not segment.padded(here.mesh):
        return here.all_gather(x, axes).movedim(0, dim)
    # padding stands at the end of every outer chunk, so the axes are undone one by one
    for axis, length in reversed(list(zip(axes, (size, *segment.chunks(here.mesh)), strict=False))):
        x = here.all_gather(x.contiguous(), (axis,)).narrow(0, 0, length)
    return x.movedim(0, dim)


def reduce_scatter(x: Tensor, dim: int, axes: tuple[str, ...]) -> Tensor:
    """The sum over the axes, of which each rank keeps its chunk along ``dim`` (padded with zeros)."""
    here = current()
    x = x.movedim(dim, 0)
    if not Segment(x.shape[0], axes).padded(here.mesh):
        return here.reduce_scatter(x.contiguous(), axes).movedim(0, dim)
    for axis in axes:
        count = here.mesh.size(axis)
        x = here.reduce_scatter(_pad(x, ceil_div(x.shape[0], count) * count).contiguous(), (axis,))
    return x.movedim(0, dim)


def all_to_all(x: Tensor, split: int, join: int, axis: str, size: int) -> Tensor:
    """Cut by ``axis`` along ``split`` instead of along ``join``, whose new length is ``size``."""
    here = current()
    count = here.mesh.size(axis)
    chunk = ceil_div(x.shape[split], count)
    moved = _pad(x.movedim(split, 0), chunk * count)
    got = here.all_to_all(moved.contiguous(), (axis,)).reshape(count, chunk, *moved.shape[1:])
    # got: [rank along join, my chunk of split, rest]; the rank becomes the major part of join
    parts = got.movedim(1, split + 1)
    return parts.movedim(0, join).flatten(join, join + 1).narrow(join, 0, size)


def shard(x: Tensor, dim: int, axes: tuple[str, ...]) -> Tensor:
    """This rank's chunk of a tensor that every rank holds whole (padded with zeros)."""
    here = current()
    for axis in axes:
        count = here.mesh.size(axis)
        chunk = ceil_div(x.shape[dim], count)
        start = min(here.coordinate(axis) * chunk, x.shape[dim])
        piece = x.narrow(dim, start, min(chunk, x.shape[dim] - start))
        x = _pad(piece.movedim(dim, 0), chunk).movedim(0, dim)
    return x


def all_gather_many(xs: list[Tensor], dims: list[int], axes: tuple[str, ...], sizes: list[int]) -> list[Tensor]:
    """Several :func:`all_gather` of one dtype as a single message. ``axes`` is one axis where there is padding."""
    here = current()
    moved = [x.movedim(d, 0) for x, d in zip(xs, dims, strict=True)]
    count = here.mesh.size(*axes)
    flat = here.all_gather(torch.cat([m.reshape(-1) for m in moved]), axes).view(count, -1)
    parts = torch.split(flat, [m.numel() for m in moved], dim=1)
    wholes = [p.reshape(count * m.shape[0], *m.shape[1:]) for p, m in zip(parts, moved, strict=True)]
    return [w.narrow(0, 0, n).movedim(0, d) for w, d, n in zip(wholes, dims, sizes, strict=True)]


def reduce_scatter_many(xs: list[Tensor], dims: list[int], axes: tuple[str, ...]) -> list[Tensor]:
    """Several :func:`reduce_scatter` of one dtype as a single message. ``axes`` is one axis where there is padding."""
    here = current()
    count = here.mesh.size(*axes)
    moved = [x.movedim(d, 0) for x, d in zip(xs, dims, strict=True)]
    padded = [_pad(m, ceil_div(m.shape[0], count) * count) for m in moved]
    flat = torch.cat([p.reshape(count, -1) for p in padded], dim=1)
    got = here.reduce_scatter(flat, axes).view(-1)
    parts = torch.split(got, [p.numel() // count for p in padded])
    shards = [g.view(p.shape[0] // count, *p.shape[1:]) for g, p in zip(parts, padded, strict=True)]
    return [s.movedim(0, d) for s, d in zip(shards, dims, strict=True)]


LARGE = 256 * 2**10
"""Bytes from which a tensor is worth a message of its own, which spares it the copy into a joint one."""


def all_reduce_many(
    xs: list[Tensor], axes: tuple[str, ...], reduction: str = "sum", owned: bool = False
) -> list[Tensor]:
    """Several :func:`all_reduce` of one dtype (not ``logsumexp``) as one message; if the tensors are ``owned``, that
    is, may be overwritten, large ones are reduced where they lie, and only the small ones are joined."""
    if owned:
        large = {i: x.contiguous() for i, x in enumerate(xs) if x.numel() * x.element_size() >= LARGE}
        small = {i: x for i, x in enumerate(xs) if i not in large}
        messages = [*large.values(), *([torch.cat([x.reshape(-1) for x in small.values()])] if small else [])]
        done = current().all_reduce_all(messages, axes, reduction)
        found = dict(zip(large, done, strict=False))
        parts = torch.split(done[-1], [x.numel() for x in small.values()]) if small else ()
        found.update({i: p.view(x.shape) for (i, x), p in zip(small.items(), parts, strict=True)})
        return [found[i] for i in range(len(xs))]
    flat = current().all_reduce(torch.cat([x.reshape(-1) for x in xs]), axes, reduction)
    return [p.view(x.shape) for p, x in zip(torch.split(flat, [x.numel() for x in xs]), xs, strict=True)]


def owe(x: Tensor, axes: tuple[str, ...]) -> Tensor:
    """A value that all ranks hold, as a sum owed over the axes: itself on the first rank, zero elsewhere."""
    here = current()
    return x if all(here.coordinate(axis) == 0 for axis in axes) else torch.zeros_like(x)


def offset(strides: tuple[tuple[str, int], ...]) -> int:
    """Where this rank's shard begins: the sum of coordinate times chunk over the cutting axes."""
    here = current()
    return sum(here.coordinate(axis) * chunk for axis, chunk in strides)


def fill_padding(x: Tensor, dim: int, size: int, axes: tuple[str, ...], value: float) -> Tensor:
    """``x`` with its elements beyond the true ``size`` of the cut dim set to ``value``."""
    here = current()
    coordinates = {axis: here.coordinate(axis) for axis in axes}
    _, valid = Segment(size, axes).bounds(here.mesh, coordinates)
    if valid >= x.shape[dim]:
        return x
    return torch.cat([x.narrow(dim, 0, valid), torch.full_like(x.narrow(dim, valid, x.shape[dim] - valid), value)], dim)


def _pad(x: Tensor, length: int) -> Tensor:
    missing = length - x.shape[0]
    return torch.cat([x, x.new_zeros((missing, *x.shape[1:]))]) if missing else x
