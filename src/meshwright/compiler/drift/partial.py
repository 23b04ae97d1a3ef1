"""A run of some positions against the run of the whole sequence: where they first differ."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from meshwright.compiler.drift.aligning import align, pairs
from meshwright.compiler.drift.step import Step, Trace
from meshwright.compiler.drift.verdict import TOLERANCE


@dataclass(frozen=True)
class Onset:
    """The first op whose result differs, and the constant that did, if one was given to it."""

    step: Step
    constant: tuple[str, str] | None = None
    """What the whole run had for these positions, and what was given."""
    there: int | None = None
    """How many positions an op before it had, where that is fewer than there have been."""


def same_positions(whole: Tensor, length: int, part: Tensor, start: int, end: int) -> Tensor | None:
    """The elements of ``whole``, of ``length`` positions, that ``part`` holds: those from ``start`` to ``end``, or up
    to ``end``. None where shapes do not say it."""
    if whole.dim() != part.dim():
        return None
    for dim, (a, b) in enumerate(zip(whole.shape, part.shape, strict=True)):
        if a == b:
            continue
        if a != length or b not in (end - start, end):
            return None
        whole = whole.narrow(dim, start, end - start) if b == end - start else whole.narrow(dim, 0, end)
    return whole


def onset(whole: Trace, length: int, part: Trace, start: int, end: int) -> Onset | None:
    """The first op, in the order of the run of the part, whose result for these positions is another one."""
    there = None
    for pair in pairs(align(whole.computing(), part.computing())):
        first, second = pair.first, pair.second
        if there is None:
            there = _fewer(first, second, length, start, end)
        if first.value is None or second.value is None:
            continue
        mine = same_positions(first.value, length, second.value, start, end)
        if mine is not None and differs(mine, second.value):
            return Onset(second, _constant(first, second, length, start, end), there)
    return None


def _fewer(first: Step, second: Step, length: int, start: int, end: int) -> int | None:
    """A size that is that of all positions in the whole run, and in the part neither of its own nor of all so far."""
    for one, other in zip(first.results, second.results, strict=False):
        for a, b in zip(one.shape, other.shape, strict=False):
            if a == length and b < end and b != end - start and len(one.shape) == len(other.shape):
                return b
    return None


def differs(a: Tensor, b: Tensor) -> bool:
    """Whether two results are apart by more than rounding in float64."""
    if a.is_complex():
        a, b = torch.view_as_real(a), torch.view_as_real(b)
    a, b = a.double(), b.double()
    fine = torch.isfinite(a) & torch.isfinite(b)
    far = torch.where(fine, a - b, 0.0).abs()
    size = torch.where(fine, a, 0.0).abs()
    return bool(far.numel()) and float(far.max()) > TOLERANCE * max(float(size.max()), 1e-30)


def _constant(first: Step, second: Step, length: int, start: int, end: int) -> tuple[str, str] | None:
    for i in sorted(first.constants.keys() & second.constants.keys()):
        a, b = first.constants[i], second.constants[i]
        mine = same_positions(a, length, b, start, end)
        if mine is not None and differs(mine, b):
            return _shown(mine), _shown(b)
    numbers = [[n for n in s.numbers if isinstance(n, float)] for s in (first, second)]
    if numbers[0] != numbers[1]:
        told = [" ".join(f"{n:g}" for n in side) for side in numbers]
        return told[0], told[1]
    return None


def _shown(value: Tensor) -> str:
    return " ".join(f"{float(v):g}" for v in value.flatten()[-4:])
