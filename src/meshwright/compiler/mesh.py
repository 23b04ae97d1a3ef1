"""The device mesh and how a tensor lies on it.

A dimension of a tensor is a product of *segments*, major to minor; each segment is cut by an
ordered tuple of mesh axes, outermost first. Most dimensions have one segment; a view such as
``[b, t, d] -> [(b t), d]`` keeps ``b`` and ``t`` as two segments of one dimension, so that it
stays local however its parts are cut (RULES.md, "a view that moves data is never free").

Cuts nest with ceiling division: a segment of ``n`` on axes of sizes ``k1, k2`` gives chunks of
``ceil(n / k1)``, then ``ceil(ceil(n / k1) / k2)``. The tail beyond the true size is padding,
whose content is unspecified until something reads across it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

MICRO = "micro"
"""The sequential axis: microbatches of one rank, one after another. Never a device axis."""


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


@dataclass(frozen=True)
class Mesh:
    """Named axes of the cluster, outermost first: ``Mesh((("data", 2), ("tensor", 4)))``."""

    axes: tuple[tuple[str, int], ...]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for name, _ in self.axes)

    @property
    def ranks(self) -> int:
        return math.prod(size for _, size in self.axes)

    def size(self, *axes: str) -> int:
        """The number of ranks along the given axes together."""
        sizes = dict(self.axes)
        return math.prod(sizes[a] for a in axes)

    def coordinates(self, rank: int) -> dict[str, int]:
        """The coordinate of a rank on every axis (last axis fastest)."""
        result = {}
        for name, size in reversed(self.axes):
            result[name] = rank % size
            rank //= size
        return result

    def rank(self, coordinates: Mapping[str, int]) -> int:
        number = 0
        for name, size in self.axes:
            number = number * size + coordinates[name]
        return number

    def group(self, rank: int, axes: Iterable[str]) -> tuple[int, ...]:
        """The ranks that differ from ``rank`` only along ``axes``, ordered by those axes as given."""
        own = self.coordinates(rank)
        ranks = [own]
        for axis in axes:
            ranks = [{**c, axis: i} for c in ranks for i in range(self.size(axis))]
        return tuple(self.rank(c) for c in ranks)

    def with_micro(self, microbatches: int) -> Mesh:
        """The mesh with the sequential microbatch axis in front; only passes use it."""
        return Mesh(((MICRO, microbatches), *self.axes))

    def __str__(self) -> str:
        return ", ".join(f"{name}={size}" for name, size in self.axes)


@dataclass(frozen=True)
class Segment:
    """One factor of a dimension: its true size and the axes that cut it, outermost first."""

    size: int
    axes: tuple[str, ...] = ()

    def chunks(self, mesh: Mesh) -> tuple[int, ...]:
        """The nested chunk sizes: after the first axis, after the second, ..."""
        sizes = []
        length = self.size
        for axis in self.axes:
            length = ceil_div(length, mesh.size(axis))
            sizes.append(length)
        return tuple(sizes)

    def local(self, mesh: Mesh) -> int:
        """The number of elements a rank holds, padding included."""
        return self.chunks(mesh)[-1] if self.axes else self.size

    def padded(self, mesh: Mesh) -> bool:
        return self.local(mesh) * mesh.size(*self.axes) != self.size

    def bounds(self, mesh: Mesh, coordinates: Mapping[str, int]) -> tuple[int, int]:
        """Where the shard of a rank begins, and how many of its elements are not padding."""
        start, valid = 0, self.size
        for axis, chunk in zip(self.axes, self.chunks(mesh), strict=True):
            start += coordinates[axis] * chunk
            valid = min(max(valid - coordinates[axis] * chunk, 0), chunk)
        return start, valid

    def __str__(self) -> str:
        return str(self.size) + "".join(f"@{axis}" for axis in self.axes)


Dim = tuple[Segment, ...]
"""A dimension of a tensor: its segments, major to minor."""


@dataclass(frozen=True)
class Sharding:
    """How one tensor lies on the mesh: the segments of each dim, and what is still owed.

    ``partial`` holds ``(axis, reduction)`` pairs: the value of the whole tensor is the reduction
    (``sum``, ``max``, ``min``, ``logsumexp``) of the copies along that axis.
    """

    dims: tuple[Dim, ...]
    partial: frozenset[tuple[str, str]] = frozenset()

    @staticmethod
    def whole(shape: Iterable[int]) -> Sharding:
        return Sharding(tuple((Segment(int(n)),) for n in shape))

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(math.prod(s.size for s in dim) for dim in self.dims)

    @property
    def axes(self) -> frozenset[str]:
        """The axes that cut some dimension."""
        return frozenset(a for dim in self.dims for s in dim for a in s.axes)

    @property
    def owed(self) -> frozenset[str]:
        return frozenset(a for a, _ in self.partial)

    def segments(self) -> Iterator[tuple[int, int, Segment]]:
        """``(dim, index within the dim, segment)`` of every segment."""
        for d, dim in enumerate(self.dims):
            for i, segment in enumerate(dim):
                yield d, i, segment

    def local_shape(self, mesh: Mesh) -> tuple[int, ...]:
        """The shape of the tensor that each rank holds, padding included."""
        return tuple(math.prod(s.local(mesh) for s in dim) for dim in self.dims)

    def expanded_shape(self, mesh: Mesh) -> tuple[int, ...]:
        """The local shape with every segment as a dimension of its own."""
        return tuple(s.local(mesh) for dim in self.dims for s in dim)

    def paid(self) -> Sharding:
        return Sharding(self.dims)

    def owing(self, partial: Iterable[tuple[str, str]]) -> Sharding:
        return Sharding(self.dims, frozenset(partial))

    def without(self, axes: Iterable[str]) -> Sharding:
        """The same with the given axes neither cutting nor owed."""
        gone = set(axes)
        dims = tuple(
            tuple(Segment(s.size, tuple(a for a in s.axes if a not in gone)) for s in dim) for dim in self.dims
        )
        return Sharding(dims, frozenset(p for p in self.partial if p[0] not in gone)).canonical()

    def canonical(self, mesh: Mesh | None = None) -> Sharding:
        """Adjacent segments joined where the joined cut is the same; see :func:`join`."""
        return Sharding(tuple(join(dim, mesh) for dim in self.dims), self.partial)

    def __str__(self) -> str:
        dims = ", ".join("*".join(map(str, dim)) if dim else "1" for dim in self.dims)
        owed = "".join(f" +{axis}" if op == "sum" else f" +{axis}:{op}" for axis, op in sorted(self.partial))
        return f"[{dims}]{owed}"


def join(dim: Dim, mesh: Mesh | None = None) -> Dim:
    """Join neighbours ``(n1, a)(n2, ())`` into ``(n1 n2, a)`` where no padding stands between.

    Without a mesh only uncut neighbours are joined, since only then divisibility is not needed.
    """
    result: list[Segment] = []
    for segment in dim:
        if segment.size == 1 and not segment.axes and len(dim) > 1:
            continue
        last = result[-1] if result else None
        if last is not None and not segment.axes and (not last.axes or (mesh is not None and not last.padded(mesh))):
            result[-1] = Segment(last.size * segment.size, last.axes)
        elif last is not None and mesh is not None and last.axes and last.local(mesh) == 1 and not last.padded(mesh):
            result[-1] = Segment(last.size * segment.size, last.axes + segment.axes)
            if result[-1].padded(mesh):
                result[-1:] = [last, segment]
        else:
            result.append(segment)
    return tuple(result) or (Segment(1),)


def split(dim: Dim, sizes: tuple[int, ...], mesh: Mesh) -> tuple[Dim, ...] | None:
    """Distribute the segments of a dimension over factors of the given sizes, major to minor.

    Returns the segments of each factor, or None when a cut straddles a factor's border, so that
    the shard of a rank is not a product of shards of the factors.
    """
    queue = list(dim)
    result: list[Dim] = []
    for size in sizes:
        parts: list[Segment] = []
        need = size
        while need > 1:
            if not queue:
                return None
            head = queue.pop(0)
            if need % head.size == 0:
                parts.append(head)
                need //= head.size
                continue
            if head.size % need:
                return None
            cut = _split_segment(head, need, mesh)
            if cut is None:
                return None
            parts.append(cut[0])
            queue.insert(0, cut[1])
            need = 1
        result.append(tuple(parts))
    if any(s.size > 1 for s in queue):
        return None
    if result and any(s.axes for s in queue):
        # segments of one element may be cut as well: their first rank has it, the others padding
        result[-1] = (*result[-1], *queue)
    return tuple(result)


def _split_segment(segment: Segment, major: int, mesh: Mesh) -> tuple[Segment, Segment] | None:
    """``(n, axes)`` as ``(major, ...)(n / major, ...)`` with every rank holding the same elements."""
    minor = segment.size // major
    for taken in range(len(segment.axes), -1, -1):
        first, rest = segment.axes[:taken], segment.axes[taken:]
        over = mesh.size(*first)
        if major % over == 0 and (not rest or (major == over and minor % mesh.size(*rest) == 0)):
            return Segment(major, first), Segment(minor, rest)
    return None


_SEGMENT = re.compile(r"(\d+)((?:@[A-Za-z_]\w*)*)$")


def parse_sharding(text: str) -> Sharding:
    """Parse what ``str(sharding)`` prints: ``[8@data, 3*4@tensor*64] +context``.

    Raises ValueError with the offending piece.
    """
    match = re.fullmatch(r"\s*\[(.*?)\]((?:\s*\+\w+(?::\w+)?)*)\s*", text)
    if not match:
        raise ValueError(f"'{text}' is not of the form [size@axis, ...]")
    dims = []
    for piece in filter(None, (p.strip() for p in match[1].split(","))):
        segments = []
        for part in piece.split("*"):
            found = _SEGMENT.match(part.strip())
            if not found:
                raise ValueError(f"'{part.strip()}' is not of the form size@axis")
            segments.append(Segment(int(found[1]), tuple(found[2].split("@")[1:])))
        dims.append(tuple(segments))
    owed = [p.partition(":") for p in match[2].replace("+", " ").split()]
    return Sharding(tuple(dims), frozenset((axis, op or "sum") for axis, _, op in owed))
