"""What one tensor sees, told for positions of any number: intervals along its own dims, and what its mask leaves.

Dims are products of *parts*, major to minor (rows and positions may be one dim), counted through all dims. Of a tensor
is kept, for tokens' positions and for their rows alike, on which interval around the index of a part it may depend; the
difference between an element's position and the token's is what all lengths have in common.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

Span = tuple[float, float]
"""``(low, high)``: the element at index i of a part may depend on what stands at ``i + low`` to ``i + high``."""

SAME: Span = (0, 0)


def joined(a: Span | None, b: Span | None) -> Span | None:
    """The smallest interval that holds both."""
    if a is None or b is None:
        return a or b
    return min(a[0], b[0]), max(a[1], b[1])


def moved(a: Span, by: Span) -> Span:
    return a[0] + by[0], a[1] + by[1]


@dataclass(frozen=True)
class Along:
    """On which tokens, along one coordinate of them: their position, or their row."""

    spans: Mapping[int, Span] = field(default_factory=dict)
    """By part."""
    fixed: Span | None = None
    """On tokens of these numbers all elements may depend: those of a dim of which one index was taken."""
    anywhere: bool = False

    def __bool__(self) -> bool:
        return bool(self.spans) or self.fixed is not None or self.anywhere

    def with_(self, part: int, span: Span) -> Along:
        return replace(self, spans={**self.spans, part: joined(self.spans.get(part), span) or span})

    def union(self, other: Along) -> Along:
        made = replace(self, fixed=joined(self.fixed, other.fixed), anywhere=self.anywhere or other.anywhere)
        for part, span in other.spans.items():
            made = made.with_(part, span)
        return made

    def within(self, part: int | None, start: int, size: int) -> Span | None:
        """How far the tokens are from an element of which ``part`` counts them, from the number ``start`` on, and that
        has ``size`` of them; None: it depends on none."""
        if self.anywhere or any(other != part for other in self.spans):
            return -math.inf, math.inf
        moving = None if part is None or part not in self.spans else moved(self.spans[part], (-start, -start))
        still = None if self.fixed is None else (self.fixed[0] - (start + size - 1), self.fixed[1] - start)
        return joined(moving, still)


@dataclass(frozen=True)
class Band:
    """A mask: where ``index of key - index of query`` is in ``[low, high]`` elements are ``inside``, elsewhere
    ``outside`` (None: not a constant)."""

    query: int
    key: int
    low: float
    high: float
    inside: float | None
    outside: float | None

    def turned(self) -> Band:
        """The same with the parts exchanged."""
        return Band(self.key, self.query, -self.high, -self.low, self.inside, self.outside)

    def other_way(self) -> Band | None:
        """The same told by its complement, where that is an interval."""
        if self.low == -math.inf and self.high < math.inf:
            return Band(self.query, self.key, self.high + 1, math.inf, self.outside, self.inside)
        if self.high == math.inf and self.low > -math.inf:
            return Band(self.query, self.key, -math.inf, self.low - 1, self.outside, self.inside)
        return None

    def filled(self, fits: Callable[[float], bool]) -> Band | None:
        """Told so that what is outside is of a kind, if it can be."""
        for band in (self, self.other_way()):
            if band is not None and band.outside is not None and fits(band.outside):
                return band
        return None

    def valued(self, of: Callable[[float | None], float | None]) -> Band | None:
        """With other values; None if neither is a constant."""
        made = replace(self, inside=of(self.inside), outside=of(self.outside))
        return None if made.inside is None and made.outside is None else made


@dataclass(frozen=True)
class Seen:
    """What is known of a tensor."""

    dims: tuple[tuple[int, ...], ...]
    """Per dim the sizes of its parts; none for a dim of size 1."""
    time: Along = field(default_factory=Along)
    row: Along = field(default_factory=Along)
    exact: bool = True
    """Whether all that it may depend on it does depend on, but for what cancels out."""
    band: Band | None = None
    line: tuple[Mapping[int, int], float] | None = None
    """The values are a sum of indices of parts, each times a number, and a constant, whatever the tokens are."""

    @property
    def depends(self) -> bool:
        return bool(self.time) or bool(self.row)

    @property
    def constant(self) -> float | None:
        """The value, if it is the same everywhere."""
        return self.line[1] if self.line is not None and not self.line[0] else None

    def parts(self) -> list[list[int]]:
        """Per dim the numbers of its parts."""
        made, number = [], 0
        for dim in self.dims:
            made.append(list(range(number, number + len(dim))))
            number += len(dim)
        return made


def blank(shape: Sequence[int]) -> Seen:
    """Of a constant or a weight."""
    return Seen(tuple((int(n),) if n != 1 else () for n in shape))
