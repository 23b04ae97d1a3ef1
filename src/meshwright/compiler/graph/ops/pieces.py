"""Ops that need much room for each element on the way work through their rows piece by piece."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

ELEMENTS = 1 << 24
"""Elements of a piece, at most, if a row has no more."""
_TOLD: ContextVar[Callable[[int], None] | None] = ContextVar("told", default=None)


def pieces(rows: int, width: int) -> Iterator[tuple[int, int]]:
    """The rows from which to which each piece goes; ``width`` is the number of elements of a row."""
    step = max(1, ELEMENTS // max(1, width))
    told = _TOLD.get()
    if told is None:
        for start in range(0, rows, step):
            yield start, min(rows, start + step)
        return
    equal = rows // step * step
    for start, end, times in ((0, min(step, equal), equal // step), (equal, rows, 1)):
        if end > start:
            told(times)
            yield start, end
            told(1)


@contextmanager
def equal_ones_once(told: Callable[[int], None]) -> Iterator[None]:
    """While it lasts, of equal pieces only the first is worked through: ``told`` hears for how many it stands."""
    token = _TOLD.set(told)
    try:
        yield
    finally:
        _TOLD.reset(token)


def largest(shape: Sequence[int], dims: int) -> int:
    """The elements of the largest piece of a tensor whose rows are made of its last ``dims`` dims."""
    rows = width = 1
    for d, size in enumerate(shape):
        if d < len(shape) - dims:
            rows *= int(size)
        else:
            width *= int(size)
    return min(rows, max(1, ELEMENTS // max(1, width))) * width
