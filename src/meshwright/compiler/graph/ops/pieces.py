"""Ops that need much room for each element on the way work through their rows piece by piece."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

ELEMENTS = 1 << 24
"""Elements of a piece, at most, if a row has no more."""


def pieces(rows: int, width: int) -> Iterator[tuple[int, int]]:
    """The rows from which to which each piece goes; ``width`` is the number of elements of a row."""
    step = max(1, ELEMENTS // max(1, width))
    for start in range(0, rows, step):
        yield start, min(rows, start + step)


def largest(shape: Sequence[int], dims: int) -> int:
    """The elements of the largest piece of a tensor whose rows are made of its last ``dims`` dims."""
    rows = width = 1
    for d, size in enumerate(shape):
        if d < len(shape) - dims:
            rows *= int(size)
        else:
            width *= int(size)
    return min(rows, max(1, ELEMENTS // max(1, width))) * width
