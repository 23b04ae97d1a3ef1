"""How well predictions agree with what was measured."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy

from benchmarks.published.rows import Row


@dataclass(frozen=True)
class Predicted:
    """What is predicted of a row."""

    seconds: float
    memory: float
    """Bytes of the device, reserve and fragmentation included."""
    fits: bool
    peak: float = 0.0
    """Bytes of the program alone."""


@dataclass(frozen=True)
class Scored:
    row: Row
    predicted: Predicted
    fitted: bool
    """Whether constants were fitted on the row."""

    @property
    def error(self) -> float | None:
        """Predicted over measured step time, minus 1."""
        return None if self.row.seconds is None else self.predicted.seconds / self.row.seconds - 1


@dataclass(frozen=True)
class Errors:
    rows: int
    median: float
    ninetieth: float
    bias: float
    """The median with its sign."""


@dataclass(frozen=True)
class Feasibility:
    rows: int
    right: int
    wrongly_fits: int
    """Ran out of memory, and was predicted to fit."""
    wrongly_fails: int


@dataclass(frozen=True)
class Sweep:
    """Rows that differ in their plan alone."""

    name: str
    measured: int
    failed: int
    correlation: float | None
    """Spearman's, of measured and predicted step times; None with fewer than three."""
    regret: float
    """Measured time of the plan that the model holds for the fastest, over the best measured one, minus 1."""
    picks_failing: bool
    """Whether of all rows that the model says fit, it would choose one that ran out of memory."""
    fitted: bool


RULE = "rows whose id has a SHA-256 that begins with an even byte"


def chosen_for_fitting(row: Row) -> bool:
    """About half of the rows of every source, by :data:`RULE`."""
    return hashlib.sha256(row.id.encode()).digest()[0] % 2 == 0


def errors(scored: Iterable[Scored]) -> Errors | None:
    found = numpy.array([s.error for s in scored if s.error is not None])
    if not len(found):
        return None
    size = numpy.abs(found)
    return Errors(len(found), float(numpy.median(size)), float(numpy.quantile(size, 0.9)), float(numpy.median(found)))


def memory_errors(scored: Iterable[Scored]) -> Errors | None:
    """Of rows whose peak memory was measured."""
    found = [
        (s.predicted.peak if s.row.formula else s.predicted.memory) / 2**30 / s.row.memory - 1
        for s in scored
        if s.row.memory
    ]
    size = numpy.abs(found)
    if not found:
        return None
    return Errors(len(found), float(numpy.median(size)), float(numpy.quantile(size, 0.9)), float(numpy.median(found)))


def feasibility(scored: Iterable[Scored]) -> Feasibility | None:
    known = [s for s in scored if s.row.fits is not None]
    if not known:
        return None
    right = sum(s.predicted.fits == s.row.fits for s in known)
    fits = sum(s.predicted.fits and not s.row.fits for s in known)
    return Feasibility(len(known), right, fits, len(known) - right - fits)


def sweeps(scored: Iterable[Scored]) -> list[Sweep]:
    """All sweeps with at least two measured rows."""
    groups: dict[Any, list[Scored]] = defaultdict(list)
    for one in scored:
        groups[one.row.sweep].append(one)
    found = []
    for members in groups.values():
        measured = [s for s in members if s.row.seconds is not None]
        if len(measured) < 2:
            continue
        best = min(s.row.seconds or 0.0 for s in measured)
        pick = min(measured, key=lambda s: s.predicted.seconds)
        open_to_choice = [s for s in members if s.predicted.fits] or measured
        choice = min(open_to_choice, key=lambda s: s.predicted.seconds)
        first = measured[0].row
        found.append(
            Sweep(
                f"{first.source[:24]}: {first.group}, batch {first.layout.batch}",
                len(measured),
                len(members) - len(measured),
                spearman([(s.row.seconds or 0.0, s.predicted.seconds) for s in measured]),
                (pick.row.seconds or 0.0) / best - 1,
                choice.row.fits is False,
                all(s.fitted for s in measured),
            )
        )
    return sorted(found, key=lambda s: -s.measured)


def spearman(pairs: list[tuple[float, float]]) -> float | None:
    """The correlation of ranks, ties sharing theirs; None with fewer than three pairs or without any difference."""
    if len(pairs) < 3:
        return None
    left, right = (_ranks([p[i] for p in pairs]) for i in (0, 1))
    if left.std() == 0 or right.std() == 0:
        return None
    return float(numpy.corrcoef(left, right)[0, 1])


def _ranks(values: list[float]) -> numpy.ndarray[Any, Any]:
    given = numpy.array(values)
    return numpy.array([(given < v).sum() + ((given == v).sum() - 1) / 2 for v in given])


def by(scored: Iterable[Scored], name: Callable[[Scored], str]) -> Mapping[str, list[Scored]]:
    groups: dict[str, list[Scored]] = defaultdict(list)
    for one in scored:
        groups[name(one)].append(one)
    return dict(sorted(groups.items(), key=lambda pair: -len(pair[1])))
