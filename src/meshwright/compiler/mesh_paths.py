"""From one sharding of a tensor to another: the communication steps, in order.

Pure functions over :class:`Sharding`; the lowering turns steps into ops, the cost model prices them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from typing import Literal

from meshwright.compiler.mesh import MICRO, Dim, Mesh, Segment, Sharding, split

StepKind = Literal["all_reduce", "reduce_scatter", "all_gather", "all_to_all", "shard", "owe", "resegment"]


@dataclass(frozen=True)
class Step:
    """One collective (or a free local cut). ``before`` and ``after`` lie on the same segments.

    ``dim`` and ``segment`` name the segment that is cut or joined; for ``all_to_all`` it is the one
    joined, and ``other`` the one cut instead. ``owe`` keeps a replicated value on the first rank of the
    axes and zeros elsewhere; ``resegment`` only renames the parts of a dim.
    """

    kind: StepKind
    before: Sharding
    after: Sharding
    axes: tuple[str, ...] = ()
    dim: int = 0
    segment: int = 0
    other: tuple[int, int] = (0, 0)
    reduction: str = "sum"


@lru_cache(maxsize=65536)
def steps(source: Sharding, target: Sharding, mesh: Mesh) -> tuple[Step, ...]:
    """The steps from ``source`` to ``target``. A sum that only the target owes is made owed last."""
    aligned = [common_segments(a, b, mesh) for a, b in zip(source.dims, target.dims, strict=True)]
    begin = tuple(a if pair is None else pair[0] for a, pair in zip(source.dims, aligned, strict=True))
    goal = tuple(b if pair is None else pair[1] for b, pair in zip(target.dims, aligned, strict=True))
    foreign = [d for d, pair in enumerate(aligned) if pair is None]
    path = _Path(source, goal, target.partial)
    path.resegment(begin)
    path.pay(foreign, mesh)
    # dims whose segments have no common refinement are gathered whole and cut anew
    for d in foreign:
        for i, segment in enumerate(path.here.dims[d]):
            path.join(d, i, segment.axes, 0)
        uncut = tuple(Segment(s.size) for s in goal[d])
        path.resegment((*path.here.dims[:d], uncut, *path.here.dims[d + 1 :]))
    path.cut_free()
    path.exchange()
    path.gather()
    path.cut_free()
    path.resegment(target.dims)
    new = tuple(a for a in mesh.names if (a, "sum") in target.partial - path.here.partial)
    if new:
        path.go("owe", path.here.owing(target.partial), axes=new)
    return tuple(path.made)


class _Path:
    """The steps made so far, and where they have led."""

    def __init__(self, source: Sharding, goal: tuple[Dim, ...], owed: frozenset[tuple[str, str]]) -> None:
        self.here = source
        self.goal = goal
        self.owed = owed
        self.made: list[Step] = []

    def go(
        self,
        kind: StepKind,
        after: Sharding,
        axes: tuple[str, ...] = (),
        dim: int = 0,
        segment: int = 0,
        other: tuple[int, int] = (0, 0),
        reduction: str = "sum",
    ) -> None:
        self.made.append(Step(kind, self.here, after, axes, dim, segment, other, reduction))
        self.here = after

    def resegment(self, dims: tuple[Dim, ...]) -> None:
        if dims != self.here.dims:
            self.go("resegment", Sharding(dims, self.here.partial))

    def cut(self, dim: int, segment: int, axes: tuple[str, ...]) -> Sharding:
        """The present sharding with one segment cut by other axes."""
        parts = list(self.here.dims[dim])
        parts[segment] = replace(parts[segment], axes=axes)
        return Sharding((*self.here.dims[:dim], tuple(parts), *self.here.dims[dim + 1 :]), self.here.partial)

    def pay(self, foreign: list[int], mesh: Mesh) -> None:
        """Pay owed sums: into the cut that the target wants where the axis is the next one there, else whole."""
        while self._reduce_scatter(foreign):
            pass
        for reduction in sorted({op for _, op in self.here.partial - self.owed}):
            paid = {(a, op) for a, op in self.here.partial - self.owed if op == reduction}
            axes = tuple(a for a in mesh.names if (a, reduction) in paid)
            self.go("all_reduce", self.here.owing(self.here.partial - paid), axes=axes, reduction=reduction)

    def _reduce_scatter(self, foreign: list[int]) -> bool:
        for d, i, segment in self.here.segments():
            if d in foreign:
                continue
            rest = _beyond(segment.axes, self.goal[d][i].axes)
            if rest and (rest[0], "sum") in self.here.partial - self.owed:
                after = self.cut(d, i, (*segment.axes, rest[0]))
                after = after.owing(after.partial - {(rest[0], "sum")})
                self.go("reduce_scatter", after, axes=rest[:1], dim=d, segment=i)
                return True
        return False

    def cut_free(self) -> None:
        """Cut along axes that are not in use: local, and it makes whatever follows smaller."""
        for d, i, segment in list(self.here.segments()):
            axes: tuple[str, ...] = ()
            for axis in _beyond(segment.axes, self.goal[d][i].axes):
                if axis in self.here.axes or axis in self.here.owed:
                    break
                axes = (*axes, axis)
            if axes:
                self.go("shard", self.cut(d, i, (*segment.axes, *axes)), axes=axes, dim=d, segment=i)

    def exchange(self) -> None:
        """An innermost axis that moves to become innermost elsewhere: one all-to-all."""
        for d, i, segment in list(self.here.segments()):
            if not segment.axes or self.goal[d][i].axes != segment.axes[:-1]:
                continue
            axis = segment.axes[-1]
            for e, j, other in list(self.here.segments()):
                if self.goal[e][j].axes[: len(other.axes) + 1] == (*other.axes, axis):
                    joined = self.cut(d, i, segment.axes[:-1])
                    self.go("all_to_all", self._cut_in(joined, e, j, axis), (axis,), d, i, (e, j))
                    break

    @staticmethod
    def _cut_in(sharding: Sharding, dim: int, segment: int, axis: str) -> Sharding:
        return _Path(sharding, (), frozenset()).cut(dim, segment, (*sharding.dims[dim][segment].axes, axis))

    def gather(self) -> None:
        for d, i, segment in list(self.here.segments()):
            self.join(d, i, segment.axes, len(_common_prefix(segment.axes, self.goal[d][i].axes)))

    def join(self, d: int, i: int, axes: tuple[str, ...], keep: int) -> None:
        """Gather a segment over all but the outermost ``keep`` of its axes: over ranks and over microbatches apart,
        since these come one after another."""
        borders = [len(axes), *(n for at in (k for k, a in enumerate(axes) if a == MICRO) for n in (at + 1, at)), keep]
        ends = sorted({n for n in borders if n >= keep}, reverse=True)
        for end, start in pairwise(ends):
            self.go("all_gather", self.cut(d, i, axes[:start]), axes=axes[start:end], dim=d, segment=i)


def common_segments(a: Dim, b: Dim, mesh: Mesh) -> tuple[Dim, Dim] | None:
    """Both dims rewritten over one list of segment sizes, or None when a cut straddles a border."""
    sizes = _refine(tuple(s.size for s in a), tuple(s.size for s in b))
    if sizes is None:
        return None
    pair = []
    for dim in (a, b):
        parts = split(dim, sizes, mesh)
        if parts is None:
            return None
        pair.append(tuple(p[0] if p else Segment(n) for p, n in zip(parts, sizes, strict=True)))
    return pair[0], pair[1]


def _refine(a: tuple[int, ...], b: tuple[int, ...]) -> tuple[int, ...] | None:
    left, right = [n for n in a if n > 1], [n for n in b if n > 1]
    sizes = []
    while left and right:
        x, y = left.pop(0), right.pop(0)
        small = min(x, y)
        if max(x, y) % small:
            return None
        sizes.append(small)
        if x > small:
            left.insert(0, x // small)
        if y > small:
            right.insert(0, y // small)
    return tuple(sizes) or (1,)


def _common_prefix(a: tuple[str, ...], b: tuple[str, ...]) -> tuple[str, ...]:
    count = 0
    while count < min(len(a), len(b)) and a[count] == b[count]:
        count += 1
    return a[:count]


def _beyond(have: tuple[str, ...], want: tuple[str, ...]) -> tuple[str, ...]:
    """What ``want`` adds inside of ``have``; nothing when it does not begin with it."""
    return want[len(have) :] if want[: len(have)] == have else ()
