"""What each collective does to a layout: the meaning of the functions of ``graph/collectives.py``, said once more.

Every function takes the layout of a tensor and the arguments of the call, and returns the layout of the result. It
raises :class:`Mismatch` where the collective does not give every rank its part of the same logical tensor.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from meshwright.compiler.equivalence.layout import Layout, Mismatch, by_local_dims, merged
from meshwright.compiler.mesh import Dim, Mesh, Segment, ceil_div

Axes = tuple[str, ...]


def all_reduce(x: Layout, axes: Axes, reduction: str, mesh: Mesh) -> Layout:
    """Every axis must be owed by this reduction."""
    for axis in _real(axes, mesh):
        if (axis, reduction) in x.owed:
            continue
        if axis in x.axes:
            raise Mismatch(f"different parts of the tensor are added up over '{axis}', which cuts it")
        other = next((r for a, r in x.owed if a == axis), None)
        if other is not None:
            raise Mismatch(f"the ranks along '{axis}' are reduced by {reduction}", reduction, other)
        if reduction not in ("max", "min"):
            raise Mismatch(
                f"the {reduction} over '{axis}' is taken of a value that owes nothing there: it counts "
                f"{mesh.size(axis)} times"
            )
    return replace(x, owed=x.owed - {(axis, reduction) for axis in axes}, filled=frozenset())


def all_gather(x: Layout, dim: int, axes: Axes, size: int, mesh: Mesh) -> Layout:
    """The axes must be the innermost ones of the segment that is outermost in the dim."""
    axes = _real(axes, mesh)
    if not axes:
        return x
    gathered = Segment(size, axes)
    if len(axes) > 1 and gathered.padded(mesh):
        # padding stands at the end of every outer chunk, so the axes are undone one by one
        for axis, length in reversed(list(zip(axes, (size, *gathered.chunks(mesh)), strict=False))):
            x = all_gather(x, dim, (axis,), length, mesh)
        return x
    parts, at = _cut_by(x, axes, mesh)
    segment = parts[at]
    behind = math.prod(s.local(mesh) for s in parts[at + 1 :])
    _at_border(x, dim, behind * segment.local(mesh), axes)
    prefix = segment.axes[: len(segment.axes) - len(axes)]
    after = Segment(segment.size, prefix)
    if segment.padded(mesh):
        if x.shape[dim] != segment.local(mesh) or size != after.local(mesh):
            raise Mismatch(f"{segment} is padded and gathered to {size} elements", str(size), str(after.local(mesh)))
    elif size != x.shape[dim] * mesh.size(*axes):
        wanted = x.shape[dim] * mesh.size(*axes)
        raise Mismatch("of what is gathered a part is cut off", str(size), str(wanted))
    segments = (*parts[:at], after, *parts[at + 1 :])
    shape = (*x.shape[:dim], size, *x.shape[dim + 1 :])
    return Layout(merged(segments, mesh), x.owed, shape, _without(x, segment.axes))


def shard(x: Layout, dim: int, axes: Axes, mesh: Mesh) -> Layout:
    """The axes must be free; each cuts what the axes before have left."""
    axes = _real(axes, mesh)
    for axis in axes:
        if axis in x.axes or axis in {a for a, _ in x.owed}:
            how = "cut by it" if axis in x.axes else "owed over it"
            raise Mismatch(f"a part along '{axis}' is taken of a value that is {how}")
    return _cut(x, dim, axes, mesh)


def reduce_scatter(x: Layout, dim: int, axes: Axes, mesh: Mesh) -> Layout:
    """A sum over the axes must be owed."""
    axes = _real(axes, mesh)
    paid = all_reduce(x, axes, "sum", mesh)
    return _cut(replace(paid, filled=x.filled), dim, axes, mesh)


def all_to_all(x: Layout, onto: int, dim: int, axis: str, size: int, mesh: Mesh) -> Layout:
    """A gather along ``dim`` and a cut along ``onto`` at once."""
    if mesh.size(axis) == 1:
        return x
    return _cut(all_gather(x, dim, (axis,), size, mesh), onto, (axis,), mesh)


def owe(x: Layout, axes: Axes, mesh: Mesh) -> Layout:
    """A value that all ranks along the axes hold."""
    for axis in (real := _real(axes, mesh)):
        if axis in x.axes or any(axis == a for a, _ in x.owed):
            raise Mismatch(f"only the first rank along '{axis}' keeps a value that differs along it")
    return replace(x, owed=x.owed | {(axis, "sum") for axis in real}, filled=frozenset())


def fill_padding(x: Layout, dim: int, size: int, axes: Axes, value: float, mesh: Mesh) -> Layout:
    """The dim must be the one segment of that size and those axes."""
    axes = _real(axes, mesh)
    given = Segment(size, axes)
    if not given.padded(mesh):
        return x
    *outer, segment = merged([given], mesh)
    for at, other in enumerate(x.segments):
        if other == segment and list(x.segments[max(0, at - len(outer)) : at]) == outer:
            behind = math.prod(s.local(mesh) for s in x.segments[at + 1 :])
            _at_border(x, dim, behind * segment.local(mesh), axes)
            if x.shape[dim] == segment.local(mesh):
                return replace(x, filled=_without(x, segment.axes) | {(segment.axes, float(value))})
    raise Mismatch(f"the padding of {given} is filled, and the tensor has no such dim", str(given))


def _real(axes: Sequence[str], mesh: Mesh) -> Axes:
    return tuple(a for a in axes if mesh.size(a) > 1)


def _cut_by(x: Layout, axes: Axes, mesh: Mesh) -> tuple[Dim, int]:
    """The segments, and the place of the one whose innermost axes these are; it may have to be split for that."""
    for at, segment in enumerate(x.segments):
        if segment.axes[-len(axes) :] == axes:
            return x.segments, at
        for end in range(len(axes), len(segment.axes)):
            # one element of the outer part on each rank: what is within is a segment of its own
            major = mesh.size(*segment.axes[:end])
            if segment.axes[end - len(axes) : end] == axes and segment.size % major == 0:
                pair = Segment(major, segment.axes[:end]), Segment(segment.size // major, segment.axes[end:])
                return (*x.segments[:at], *pair, *x.segments[at + 1 :]), at
    named = ", ".join(axes)
    if {a for a, _ in x.owed} & set(axes):
        raise Mismatch(f"parts are gathered over '{named}', and the value owes a sum over it: none of them is a part")
    there = next((str(s) for s in x.segments if set(axes) & set(s.axes)), "")
    if there:
        raise Mismatch(f"the parts are joined in the order of ({named}), and they are cut as {there}", named, there)
    raise Mismatch(f"parts are gathered over '{named}', which does not cut the value: it comes several times")


def _at_border(x: Layout, dim: int, reach: int, axes: Axes) -> None:
    """The outer end of the segment must be that of the dim."""
    if math.prod(x.shape[dim:]) != reach:
        raise Mismatch(f"the parts along '{', '.join(axes)}' are not those of dim {dim} of {list(x.shape)}")


def _cut(x: Layout, dim: int, axes: Axes, mesh: Mesh) -> Layout:
    for axis in axes:
        x = _cut_once(x, dim, axis, mesh)
    return x


def _cut_once(x: Layout, dim: int, axis: str, mesh: Mesh) -> Layout:
    dims = by_local_dims(x, mesh)
    parts, count = dims[dim], mesh.size(axis)
    at = next((i for i, s in enumerate(parts) if s.local(mesh) > 1), None)
    if at is None:
        raise Mismatch(f"dim {dim} of {list(x.shape)} has one element, and is cut by '{axis}'")
    head = parts[at]
    alone = x.shape[dim] == head.local(mesh)
    if head.local(mesh) % count and not alone:
        raise Mismatch(f"a cut of dim {dim} of {list(x.shape)} by '{axis}' goes through {head}")
    zero = not head.axes or (head.axes, 0.0) in x.filled
    parts[at] = cut = Segment(head.size, (*head.axes, axis))
    shape = (*x.shape[:dim], ceil_div(x.shape[dim], count), *x.shape[dim + 1 :])
    filled = _without(x, head.axes)
    if zero and cut.padded(mesh):
        filled |= {(cut.axes, 0.0)}
    return Layout(merged((s for d in dims for s in d), mesh), x.owed, shape, filled)


def _without(x: Layout, axes: Axes) -> frozenset[tuple[Axes, float]]:
    return frozenset(f for f in x.filled if f[0] != axes)
