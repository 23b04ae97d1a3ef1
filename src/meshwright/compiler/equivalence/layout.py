"""How the ranks' tensors lie beside a logical tensor: the checker's own record, independent of dims.

A logical tensor is seen as its elements in row-major order, so that a view is no change at all. A rank's tensor is then
a row of *segments*, major to minor: each has its true size and the axes that cut it. The local shape is kept beside.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from meshwright.compiler.mesh import Dim, Mesh, Segment, Sharding, join, split

Owed = frozenset[tuple[str, str]]
"""Pairs of an axis and the reduction that is owed over it."""


class Mismatch(Exception):
    """Why a rank's op does not give what the step for one device does: what was found, and what must be."""

    def __init__(self, message: str, found: str = "", expected: str = "") -> None:
        super().__init__(message)
        self.message, self.found, self.expected = message, found, expected


@dataclass(frozen=True, slots=True)
class Layout:
    """How the ranks hold a logical tensor: its segments in row-major order, what is owed, and the local shape.

    ``filled``: by the axes of a padded segment, what its padding is known to hold.
    """

    segments: Dim
    owed: Owed
    shape: tuple[int, ...]
    filled: frozenset[tuple[tuple[str, ...], float]] = frozenset()

    @property
    def axes(self) -> frozenset[str]:
        """The axes that cut the tensor."""
        return frozenset(a for s in self.segments for a in s.axes)

    def dims(self, shape: Sequence[int], mesh: Mesh) -> tuple[Dim, ...] | None:
        """The segments of each dim of the logical tensor in a shape; None where a cut straddles a border."""
        return split(self.segments, tuple(shape), mesh)

    def told(self, shape: Sequence[int], mesh: Mesh) -> str:
        """The layout as shardings are written, over the logical shape if it can be."""
        dims = self.dims(shape, mesh)
        whole = (self.segments,) if dims is None else tuple(dim or (Segment(1),) for dim in dims)
        return str(Sharding(whole, self.owed))


def merged(segments: Iterable[Segment], mesh: Mesh) -> Dim:
    """The one form in which equal rows of segments are equal: joined where that is possible; where a cut by several
    axes leaves padding, with those outer ones apart that come out even (``9@a@b`` is ``3@a*3@b`` on 3 by 2)."""
    return tuple(part for segment in join(tuple(segments), mesh) for part in _apart(segment, mesh))


def _apart(segment: Segment, mesh: Mesh) -> Dim:
    if len(segment.axes) > 1 and segment.padded(mesh):
        for count in range(len(segment.axes) - 1, 0, -1):
            major = mesh.size(*segment.axes[:count])
            if segment.size % major == 0:
                return Segment(major, segment.axes[:count]), Segment(segment.size // major, segment.axes[count:])
    return (segment,)


def of_sharding(sharding: Sharding, mesh: Mesh) -> Layout:
    """The layout that a sharding says, axes of one rank left out."""
    dims = tuple(tuple(_cut_by_several(s, mesh) for s in dim) for dim in sharding.dims)
    owed = frozenset(p for p in sharding.partial if mesh.size(p[0]) > 1)
    shape = tuple(math.prod(s.local(mesh) for s in dim) for dim in dims)
    return Layout(merged((s for dim in dims for s in dim), mesh), owed, shape)


def _cut_by_several(segment: Segment, mesh: Mesh) -> Segment:
    axes = tuple(a for a in segment.axes if mesh.size(a) > 1)
    return segment if axes == segment.axes else Segment(segment.size, axes)


def same_place(first: Layout, second: Layout) -> bool:
    """Whether two layouts of one logical tensor are the same, whatever the padding holds."""
    return first.segments == second.segments and first.owed == second.owed


def reshaped(layout: Layout, shape: tuple[int, ...]) -> Layout:
    """The same elements in another local shape. Raises Mismatch if there are not as many."""
    if math.prod(shape) != math.prod(layout.shape):
        raise Mismatch(f"a tensor of shape {list(layout.shape)} is regrouped to {list(shape)}")
    return layout if shape == layout.shape else replace(layout, shape=shape)


def by_local_dims(layout: Layout, mesh: Mesh) -> list[list[Segment]]:
    """The segments that each local dim is made of. Raises Mismatch where a dim's border lies within a cut one."""
    queue = list(layout.segments)
    found: list[list[Segment]] = []
    for size in layout.shape:
        parts: list[Segment] = []
        need = size
        while need > 1:
            if not queue:
                raise Mismatch(f"the local shape {list(layout.shape)} does not fit {_written(layout.segments)}")
            head = queue.pop(0)
            length = head.local(mesh)
            if need % length == 0:
                parts.append(head)
                need //= length
            elif length % need == 0 and not head.padded(mesh):
                parts.append(Segment(need * mesh.size(*head.axes), head.axes))
                queue.insert(0, Segment(length // need))
                need = 1
            else:
                raise Mismatch(f"the local shape {list(layout.shape)} does not fit {_written(layout.segments)}")
        found.append(parts)
    if found:
        found[-1] += queue
    return found


def _written(segments: Dim) -> str:
    return "*".join(map(str, segments))
