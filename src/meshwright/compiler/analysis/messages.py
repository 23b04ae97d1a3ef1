"""A collective of a rank program as what the runtime does for it: packing copies, messages, unpacking copies, and the
memory that it takes.

Counted from shapes as :mod:`meshwright.compiler.graph.collectives` carries it out: padding, several axes and joined
messages are sent as they are here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from meshwright.compiler.analysis.shaped import Shaped, shaped
from meshwright.compiler.graph import collectives
from meshwright.compiler.graph.dtypes import dtype_named
from meshwright.compiler.graph.meeting import axes_of, meets
from meshwright.compiler.mesh import MICRO, Mesh, Segment, ceil_div
from meshwright.compiler.summary import Kernel, KernelKind, Message, MessageKind

Work = Kernel | Message


@dataclass
class Sending:
    """One collective: what is done for it, in order, and where its results lie."""

    mesh: Mesh
    asynchronous: bool = False
    works: list[Work] = field(default_factory=list)
    pieces: list[int] = field(default_factory=list)
    """The bytes of every piece of memory that it makes for its results."""
    since: list[int] = field(default_factory=list)
    """Before which work each piece is made."""
    places: list[int] = field(default_factory=list)
    """By result: the number of its piece, or ``-1 - i`` if it lies in the memory of operand ``i``."""
    carried: list[tuple[int, int]] = field(default_factory=list)
    """Bytes of joined and packed tensors, and before which work each is made; they live as long as the message."""

    def copy(self, size: int, op: str, dtype: str, kind: KernelKind = "copy") -> None:
        if size:
            self.works.append(Kernel(op, kind, 0.0, size, size, dtype))

    def carry(self, size: int, dtype: str, op: str = "pack") -> None:
        """Copy into memory that the message holds."""
        self.carried.append((size, len(self.works)))
        self.copy(size, op, dtype)

    def send(self, kind: MessageKind, axes: Sequence[str], payload: int, dtype: str) -> None:
        if self.mesh.size(*axes) > 1:
            self.works.append(Message(kind, tuple(axes), payload, dtype, self.asynchronous))

    def result(self, size: int, *, since: int = 0) -> None:
        """A result in memory of its own."""
        self.places.append(len(self.pieces))
        self.piece(size, since)

    def piece(self, size: int, since: int = 0) -> None:
        self.pieces.append(size)
        self.since.append(since)

    def results_in_one(self, count: int, size: int) -> None:
        """Results that are parts of one piece."""
        self.places += [len(self.pieces)] * count
        self.piece(size)

    def pack(self, x: Shaped) -> Shaped:
        """``x`` contiguous."""
        if x.packed():
            return x
        self.carry(x.bytes, x.dtype)
        return x.rows(x.shape[0])

    def pad(self, x: Shaped, length: int) -> Shaped:
        if length == x.shape[0]:
            return x
        made = x.rows(length)
        self.carry(made.bytes, x.dtype, "pad")
        return made


def sending(node: fx.Node, mesh: Mesh) -> Sending:
    """What a node does that calls one of the collectives (``wait`` apart). The mesh has the axis ``micro``."""
    arguments: tuple[Any, ...] = node.args
    made = Sending(mesh, node.target in collectives.BEGINS)
    name = getattr(node.target, "__name__", "")
    if meets(node):
        _meet(made, node, shaped(arguments[0]))
    elif name in _LISTS:
        operands = [shaped(n) for n in arguments[0]]
        run: Any = _LISTS[name]
        run(made, operands, *arguments[1:])
    elif name in _SINGLE:
        single: Any = _SINGLE[name]
        single(made, shaped(arguments[0]), *arguments[1:])
    return made


def unpacking(begin: fx.Node, mesh: Mesh) -> Sending:
    """What is done when a message that ``begin`` began is waited for. What is unpacked is still there meanwhile."""
    arguments: tuple[Any, ...] = begin.args
    made = Sending(mesh)
    if begin.target is collectives.all_gather_begin:
        operands = [shaped(n) for n in arguments[0]]
        if len(operands) > 1:
            made.carried.append((sum(x.bytes for x in operands) * mesh.size(*arguments[2]), 0))
        _unpack_gather(made, operands, arguments[2])
    if begin.target is collectives.reduce_scatter_wide_begin:
        operands = [shaped(n) for n in arguments[0]]
        total = _wide_payload(made, operands, arguments[1], arguments[2])
        made.carried.append((total, 0))
        _sum_wide(made, total, operands[0].dtype, arguments[2], arguments[3])
    return made


def _all_reduce(made: Sending, x: Shaped, axes: Sequence[str], reduction: str = "sum") -> None:
    if reduction != "logsumexp":
        made.result(x.bytes)
        made.copy(x.bytes, "pack", x.dtype)
        made.send("all-reduce", axes, x.bytes, x.dtype)
        return
    made.carry(x.bytes, x.dtype)
    made.send("all-reduce", axes, x.bytes, x.dtype)
    for op in ("isfinite", "zeros_like", "where", "sub", "exp"):
        made.copy(x.bytes, op, x.dtype, "elementwise")
    made.carried += [(x.bytes, len(made.works) - 3), (x.bytes, len(made.works) - 1)]
    made.send("all-reduce", axes, x.bytes, x.dtype)
    for op in ("log", "add"):
        made.copy(x.bytes, op, x.dtype, "elementwise")
    made.result(x.bytes)


def _all_gather(made: Sending, x: Shaped, dim: int, axes: Sequence[str], size: int) -> None:
    x = made.pack(x.moved(dim))
    segment = Segment(size, tuple(axes))
    if not segment.padded(made.mesh):
        made.send("all-gather", axes, x.bytes * made.mesh.size(*axes), x.dtype)
        made.result(x.bytes * made.mesh.size(*axes))
        return
    for axis, length in reversed(list(zip(axes, (size, *segment.chunks(made.mesh)), strict=False))):
        gathered = x.bytes * made.mesh.size(axis)
        if axis != axes[0]:
            made.carried.append((gathered, len(made.works)))
        else:
            made.result(gathered)
        made.send("all-gather", (axis,), gathered, x.dtype)
        x = x.rows(length)


def _reduce_scatter(made: Sending, x: Shaped, dim: int, axes: Sequence[str]) -> None:
    x = x.moved(dim)
    if not Segment(x.shape[0], tuple(axes)).padded(made.mesh):
        made.send("reduce-scatter", axes, made.pack(x).bytes, x.dtype)
        made.result(x.bytes // made.mesh.size(*axes))
        return
    for axis in axes:
        count = made.mesh.size(axis)
        x = made.pack(made.pad(x, ceil_div(x.shape[0], count) * count))
        made.send("reduce-scatter", (axis,), x.bytes, x.dtype)
        x = x.rows(x.shape[0] // count)
    made.result(x.bytes)


def _reduce_scatter_wide(made: Sending, x: Shaped, dim: int, axes: Sequence[str], dtype: torch.dtype) -> None:
    _reduce_scatter_wide_many(made, [x], [dim], axes, dtype)


def _reduce_scatter_wide_many(
    made: Sending, xs: Sequence[Shaped], dims: Sequence[int], axes: Sequence[str], dtype: torch.dtype
) -> None:
    total = _wide_payload(made, xs, dims, axes)
    if len(xs) == 1:
        x = xs[0].moved(dims[0])
        if total == x.bytes:
            made.pack(x)
        else:
            made.carry(total, x.dtype, "pad")
    else:
        made.carry(total, xs[0].dtype)
    made.carried.append((total, len(made.works)))
    made.send("all-to-all", axes, total, xs[0].dtype)
    if not made.asynchronous:
        _sum_wide(made, total, xs[0].dtype, axes, dtype)
    made.results_in_one(len(xs), _summed(made, total, xs[0].dtype, axes, dtype))


def _wide_payload(made: Sending, xs: Sequence[Shaped], dims: Sequence[int], axes: Sequence[str]) -> int:
    """The bytes of all addends, each dim cut by every axis in turn and padded at each."""
    total = 0
    for x, dim in zip(xs, dims, strict=True):
        moved = x.moved(dim)
        length = moved.shape[0]
        for axis in axes:
            length = ceil_div(length, made.mesh.size(axis))
        total += moved.rows(length * made.mesh.size(*axes)).bytes
    return total


def _summed(made: Sending, total: int, sent: str, axes: Sequence[str], dtype: torch.dtype) -> int:
    """The bytes of the sums."""
    return total // made.mesh.size(*axes) // dtype_named(sent).itemsize * dtype.itemsize


def _sum_wide(made: Sending, total: int, sent: str, axes: Sequence[str], dtype: torch.dtype) -> None:
    """The addends of all ranks are read once, added in registers, and the sums are written."""
    if made.mesh.size(*axes) > 1:
        work = float(total // dtype_named(sent).itemsize)
        made.works.append(Kernel("sum", "reduction", work, total, _summed(made, total, sent, axes, dtype), sent))


def _all_to_all(made: Sending, x: Shaped, split: int, join: int, axis: str, size: int) -> None:
    count = made.mesh.size(axis)
    x = x.moved(split)
    x = made.pack(made.pad(x, ceil_div(x.shape[0], count) * count))
    made.carried.append((x.bytes, len(made.works)))
    made.send("all-to-all", (axis,), x.bytes, x.dtype)
    made.copy(x.bytes, "unpack", x.dtype)
    made.result(x.bytes)


def _shard(made: Sending, x: Shaped, dim: int, axes: Sequence[str]) -> None:
    length = x.shape[dim]
    padded = False
    for axis in axes:
        count = made.mesh.size(axis)
        padded |= bool(length % count)
        length = ceil_div(length, count)
    if not padded:
        made.places.append(-1)  # a part of the whole
        return
    # the last rank has less and pads it
    part = x.moved(dim).rows(length)
    made.copy(part.bytes, "pad", x.dtype)
    made.result(part.bytes)


def _fill_padding(made: Sending, x: Shaped, *_: Any) -> None:
    # the rank at the end writes the whole tensor anew
    made.copy(x.bytes, "fill_padding", x.dtype)
    made.result(x.bytes)


def _owe(made: Sending, x: Shaped, *_: Any) -> None:
    # zeros on all ranks but the first
    made.copy(x.bytes, "owe", x.dtype)
    made.result(x.bytes)


def _meet(made: Sending, node: fx.Node, x: Shaped) -> None:
    """Microbatches meet on the device itself: each adds its part to a total, or to what is joined; what is still owed
    over ranks is paid once for all of them."""
    if node.target is not collectives.all_reduce:
        joined = node.target in (collectives.all_gather, collectives.all_to_all)
        made.copy(x.bytes, "join" if joined else "add", x.dtype, "copy" if joined else "elementwise")
        made.result(shaped(node).bytes)
        return
    made.result(x.bytes)
    made.copy(x.bytes, "add", x.dtype, "elementwise")
    axes = tuple(axis for axis in axes_of(node) if axis != MICRO)
    if made.mesh.size(*axes) > 1:
        made.works.append(Message("all-reduce", axes, x.bytes, x.dtype, shared=made.mesh.size(MICRO)))


def _all_gather_many(
    made: Sending, xs: Sequence[Shaped], dims: Sequence[int], axes: Sequence[str], _: Sequence[int]
) -> None:
    count = made.mesh.size(*axes)
    total = sum(x.bytes for x in xs)
    if len(xs) > 1:
        made.carry(total, xs[0].dtype)
    else:
        made.pack(xs[0].moved(dims[0]))
    if len(xs) > 1 and not made.asynchronous:
        made.carried.append((total * count, len(made.works)))
    made.send("all-gather", axes, total * count, xs[0].dtype)
    unpacked = len(made.works) if len(xs) > 1 and not made.asynchronous else 0
    for x in xs:
        made.result(x.bytes * count, since=unpacked)
    if not made.asynchronous:
        _unpack_gather(made, xs, axes)


def _unpack_gather(made: Sending, xs: Sequence[Shaped], axes: Sequence[str]) -> None:
    """Of several joined tensors each rank's part holds a piece of each, so they are put together by copies."""
    if len(xs) > 1:
        for x in xs:
            made.copy(x.bytes * made.mesh.size(*axes), "unpack", x.dtype)


def _reduce_scatter_many(made: Sending, xs: Sequence[Shaped], dims: Sequence[int], axes: Sequence[str]) -> None:
    count = made.mesh.size(*axes)
    moved = [x.moved(d) for x, d in zip(xs, dims, strict=True)]
    padded = [made.pad(m, ceil_div(m.shape[0], count) * count) for m in moved]
    total = sum(p.bytes for p in padded)
    if len(padded) == 1:
        made.pack(padded[0])
    else:
        made.carry(total, xs[0].dtype)
    made.send("reduce-scatter", axes, total, xs[0].dtype)
    made.results_in_one(len(xs), total // count)


def _all_reduce_many(
    made: Sending, xs: Sequence[Shaped], axes: Sequence[str], _: str = "sum", owned: bool = False
) -> None:
    alone = [owned and x.bytes >= collectives.LARGE for x in xs]
    total = sum(x.bytes for x, own in zip(xs, alone, strict=True) if not own)
    joined = len(made.pieces)
    if not all(alone):
        made.piece(total)
    for i, (x, own) in enumerate(zip(xs, alone, strict=True)):
        if not own:
            made.places.append(joined)
            continue
        if x.packed():
            made.places.append(-1 - i)  # reduced where it lies
        else:
            made.copy(x.bytes, "pack", x.dtype)
            made.result(x.bytes)
        made.send("all-reduce", axes, x.bytes, x.dtype)
    if not all(alone):
        made.copy(total, "pack", xs[0].dtype)
        made.send("all-reduce", axes, total, xs[0].dtype)


_SINGLE = {
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "reduce_scatter_wide": _reduce_scatter_wide,
    "all_to_all": _all_to_all,
    "shard": _shard,
    "fill_padding": _fill_padding,
    "owe": _owe,
}
_LISTS = {
    "all_gather_many": _all_gather_many,
    "reduce_scatter_many": _reduce_scatter_many,
    "reduce_scatter_wide_many": _reduce_scatter_wide_many,
    "all_reduce_many": _all_reduce_many,
    "all_gather_begin": _all_gather_many,
    "reduce_scatter_begin": _reduce_scatter_many,
    "reduce_scatter_wide_begin": _reduce_scatter_wide_many,
    "all_reduce_begin": _all_reduce_many,
}
