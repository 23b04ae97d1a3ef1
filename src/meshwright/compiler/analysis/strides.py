"""How the elements of a tensor lie in memory: what a view can show, and how many different ones there are."""

from __future__ import annotations

import math
from collections.abc import Sequence


def elements(shape: Sequence[int], strides: Sequence[int]) -> int:
    """The number of different elements: along a dim of stride 0 (expanded) they are the same."""
    return math.prod([n for n, stride in zip(shape, strides, strict=True) if stride or not n])


def contiguous(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether the elements lie one after the other in the order of the dims."""
    wanted = 1
    for n, stride in zip(reversed(shape), reversed(strides), strict=True):
        if n != 1 and stride != wanted:
            return n == 0 or 0 in shape
        wanted *= n
    return True


def as_view(shape: Sequence[int], strides: Sequence[int], wanted: Sequence[int]) -> bool:
    """Whether a tensor can be seen as one of another shape without moving an element.

    Neighbouring dims that lie one after the other are one run of memory; each run must be a product of
    dims of the wanted shape.
    """
    if 0 in shape:
        return True
    runs: list[list[int]] = []  # [size, stride], major to minor
    for n, stride in zip(shape, strides, strict=True):
        if n == 1:
            continue
        if runs and runs[-1][1] == stride * n:
            runs[-1] = [runs[-1][0] * n, stride]
        else:
            runs.append([n, stride])
    queue = [n for n in wanted if n != 1]
    for size, _ in runs:
        made = 1
        while made < size and queue:
            made *= queue.pop(0)
        if made != size:
            return False
    return not queue
