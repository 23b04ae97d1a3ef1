"""The communication ops of a rank program: plain functions that an FX graph calls.

Each asks the current :class:`Communicator` (set by whoever runs the program) to do the work, so
the same program runs under ``torch.distributed`` and in the virtual cluster. ``dim`` counts the
dims of the tensor as given; sizes are local unless said otherwise.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Protocol

import torch
from torch import Tensor

from meshwright.compiler.graph.pending import Kind, Pending, Work
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

    def all_gather(self, x: Tensor, axes: tuple[str, ...]) -> Tensor:
        """``[n, ...] -> [k n, ...]``: concatenated along dim 0, first axis outermost."""
        ...

    def reduce_scatter(self, x: Tensor, axes: tuple[str, ...]) -> Tensor:
        """``[k n, ...] -> [n, ...]``: the sum, cut along dim 0."""
        ...

    def all_to_all(self, x: Tensor, axes: tuple[str, ...]) -> Tensor:
        """``[k n, ...] -> [k n, ...]``: chunk j of dim 0 goes to rank j of the group."""
        ...

    def begin(self, kind: Kind, x: Tensor, axes: tuple[str, ...], reduction: str = "sum") -> Work:
        """Begin one of the above and go on. All ranks of a group begin and call in one order. Until it is waited for,
        ``x`` is neither written nor, if it is to be reduced, read."""
        ...


LARGE = 256 * 2**10
"""Bytes from which a tensor is worth a message of its own, which spares it the copy into a joint one."""

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


def reduce_scatter_wide(x: Tensor, dim: int, axes: tuple[str, ...], dtype: torch.dtype) -> Tensor:
    """:func:`reduce_scatter` of which every sum is taken in fp32 and rounded once, to ``dtype``.

    What is sent has the dtype of ``x``: each rank sends its addends to the rank that keeps their sum (an all-to-all, of
    as many bytes as a reduce-scatter in that dtype). Padded alike.
    """
    return reduce_scatter_wide_many([x], [dim], axes, dtype)[0]


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
    flat, finish = _joined_for_gather(xs, dims, axes, sizes)
    return finish([current().all_gather(flat, axes)])


def reduce_scatter_many(xs: list[Tensor], dims: list[int], axes: tuple[str, ...]) -> list[Tensor]:
    """Several :func:`reduce_scatter` of one dtype as a single message. ``axes`` is one axis where there is padding."""
    flat, finish = _joined_for_scatter(xs, dims, axes)
    return finish([current().reduce_scatter(flat, axes)])


def reduce_scatter_wide_many(
    xs: list[Tensor], dims: list[int], axes: tuple[str, ...], dtype: torch.dtype
) -> list[Tensor]:
    """Several :func:`reduce_scatter_wide` of one dtype as a single message."""
    flat, finish = _joined_for_wide_sum(xs, dims, axes, dtype)
    return finish([current().all_to_all(flat, axes)])


def all_reduce_many(
    xs: list[Tensor], axes: tuple[str, ...], reduction: str = "sum", owned: bool = False
) -> list[Tensor]:
    """Several :func:`all_reduce` of one dtype (not ``logsumexp``) as one message; if the tensors are ``owned``, that
    is, may be overwritten, large ones are reduced where they lie, and only the small ones are joined."""
    return wait(all_reduce_begin(xs, axes, reduction, owned))


def all_gather_begin(xs: list[Tensor], dims: list[int], axes: tuple[str, ...], sizes: list[int]) -> Pending:
    """Begin :func:`all_gather_many`. The tensors must not be written before the :func:`wait`."""
    flat, finish = _joined_for_gather(xs, dims, axes, sizes)
    return Pending((current().begin("all_gather", flat, axes),), finish)


def reduce_scatter_begin(xs: list[Tensor], dims: list[int], axes: tuple[str, ...]) -> Pending:
    """Begin :func:`reduce_scatter_many`. The tensors must not be written before the :func:`wait`."""
    flat, finish = _joined_for_scatter(xs, dims, axes)
    return Pending((current().begin("reduce_scatter", flat, axes),), finish)


def reduce_scatter_wide_begin(xs: list[Tensor], dims: list[int], axes: tuple[str, ...], dtype: torch.dtype) -> Pending:
    """Begin :func:`reduce_scatter_wide_many`; the sums are taken at the :func:`wait`."""
    flat, finish = _joined_for_wide_sum(xs, dims, axes, dtype)
    return Pending((current().begin("all_to_all", flat, axes),), finish)


def all_reduce_begin(xs: list[Tensor], axes: tuple[str, ...], reduction: str = "sum", owned: bool = False) -> Pending:
    """Begin :func:`all_reduce_many`. The tensors must not be written before the :func:`wait`."""
    alone = {i: x.contiguous() for i, x in enumerate(xs) if owned and x.numel() * x.element_size() >= LARGE}
    joined = {i: x for i, x in enumerate(xs) if i not in alone}
    messages = [*alone.values(), *([torch.cat([x.reshape(-1) for x in joined.values()])] if joined else [])]
    shapes = {i: x.shape for i, x in joined.items()}

    def finish(done: list[Tensor]) -> list[Tensor]:
        found = dict(zip(alone, done, strict=False))
        parts = torch.split(done[-1], [shape.numel() for shape in shapes.values()]) if shapes else ()
        found.update({i: p.view(shape) for (i, shape), p in zip(shapes.items(), parts, strict=True)})
        return [found[i] for i in range(len(found))]

    return Pending(tuple(current().begin("all_reduce", m, axes, reduction) for m in messages), finish)


BEGINS = (all_gather_begin, reduce_scatter_begin, reduce_scatter_wide_begin, all_reduce_begin)
"""What begins a message; each is waited for once."""


def wait(pending: Pending) -> list[Tensor]:
    """The results of what has begun, once they are there."""
    return pending.finish([work.wait() for work in pending.works])


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


Finish = Callable[[list[Tensor]], list[Tensor]]


def _joined_for_gather(
    xs: list[Tensor], dims: list[int], axes: tuple[str, ...], sizes: list[int]
) -> tuple[Tensor, Finish]:
    """The message that gathers all of ``xs``, and how its result is taken apart."""
    count = current().mesh.size(*axes)
    moved = [x.movedim(d, 0) for x, d in zip(xs, dims, strict=True)]
    shapes = [m.shape for m in moved]

    def finish(done: list[Tensor]) -> list[Tensor]:
        parts = torch.split(done[0].view(count, -1), [shape.numel() for shape in shapes], dim=1)
        # contiguous, since a view of its part would keep all of the message alive
        wholes = [p.contiguous().view(count * shape[0], *shape[1:]) for p, shape in zip(parts, shapes, strict=True)]
        return [w.narrow(0, 0, n).movedim(0, d) for w, d, n in zip(wholes, dims, sizes, strict=True)]

    return _flat(moved), finish


def _joined_for_scatter(xs: list[Tensor], dims: list[int], axes: tuple[str, ...]) -> tuple[Tensor, Finish]:
    """The message that reduces and scatters all of ``xs``, and how its result is taken apart."""
    count = current().mesh.size(*axes)
    moved = [x.movedim(d, 0) for x, d in zip(xs, dims, strict=True)]
    padded = [_pad(m, ceil_div(m.shape[0], count) * count) for m in moved]
    shapes = [torch.Size((p.shape[0] // count, *p.shape[1:])) for p in padded]

    def finish(done: list[Tensor]) -> list[Tensor]:
        parts = torch.split(done[0].view(-1), [shape.numel() for shape in shapes])
        return [p.view(shape).movedim(0, d) for p, shape, d in zip(parts, shapes, dims, strict=True)]

    if len(padded) == 1:
        return padded[0].reshape(-1), finish
    return torch.cat([p.reshape(count, -1) for p in padded], dim=1).view(-1), finish


def _joined_for_wide_sum(
    xs: list[Tensor], dims: list[int], axes: tuple[str, ...], dtype: torch.dtype
) -> tuple[Tensor, Finish]:
    """The message that brings the addends of all of ``xs`` to who adds them, and how they are added and taken apart."""
    mesh = current().mesh
    count = mesh.size(*axes)
    padded = [_pad_by_axes(x.movedim(d, 0), axes, mesh) for x, d in zip(xs, dims, strict=True)]
    shapes = [torch.Size((p.shape[0] // count, *p.shape[1:])) for p in padded]

    def finish(done: list[Tensor]) -> list[Tensor]:
        total = torch.sum(done[0].view(count, -1), 0, dtype=torch.promote_types(dtype, torch.float32)).to(dtype)
        parts = torch.split(total, [shape.numel() for shape in shapes])
        return [p.view(shape).movedim(0, d) for p, shape, d in zip(parts, shapes, dims, strict=True)]

    if len(padded) == 1:
        return padded[0].reshape(-1), finish
    return torch.cat([p.reshape(count, -1) for p in padded], dim=1).view(-1), finish


def _pad_by_axes(x: Tensor, axes: tuple[str, ...], mesh: Mesh) -> Tensor:
    """Dim 0 cut by each axis in turn and padded at each: the chunks of all ranks of the group, one after another."""
    if not Segment(x.shape[0], axes).padded(mesh):
        return x
    x = x.unsqueeze(0)
    for axis in axes:
        count = mesh.size(axis)
        chunk = ceil_div(x.shape[1], count)
        missing = chunk * count - x.shape[1]
        if missing:
            x = torch.cat([x, x.new_zeros((x.shape[0], missing, *x.shape[2:]))], dim=1)
        x = x.reshape(x.shape[0] * count, chunk, *x.shape[2:])
    return x.flatten(0, 1)


def _flat(xs: list[Tensor]) -> Tensor:
    """The elements of all tensors one after another; of a single one without a copy, if it lies so."""
    return xs[0].reshape(-1) if len(xs) == 1 else torch.cat([x.reshape(-1) for x in xs])
