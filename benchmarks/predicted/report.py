"""What is told of the plans: predicted and measured, their errors, and whether they are ranked alike."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from benchmarks.predicted.cases import Case
from benchmarks.predicted.measure import Measured
from benchmarks.published.score import spearman
from meshwright.compiler.prediction import Prediction

MIB = 2**20


@dataclass(frozen=True)
class Result:
    """A plan, as predicted and as measured."""

    case: Case
    predicted: Prediction
    measured: Measured

    @property
    def time_error(self) -> float:
        return self.predicted.seconds / self.measured.seconds - 1

    @property
    def memory_error(self) -> float:
        return self.predicted.memory.peak / self.measured.peak - 1

    def row(self) -> dict[str, object]:
        """All figures; seconds and bytes."""
        p = self.predicted
        return {
            "model": self.case.model,
            "plan": self.case.plan,
            "ranks": self.case.ranks,
            "seconds": {"predicted": p.seconds, "measured": self.measured.seconds, "error": self.time_error},
            "peak": {"predicted": p.memory.peak, "measured": self.measured.peak, "error": self.memory_error},
            "compute": dict(p.compute),
            "exposed": dict(p.exposed),
            "other": dict(p.other),
            "memory": dict(p.memory.by_kind),
            "at": {"graph": p.memory.at.graph, "item": p.memory.at.item},
        }


@dataclass(frozen=True)
class Totals:
    """Over all plans."""

    median_time_error: float
    largest_time_error: float
    spearman: float | None
    spearman_by_ranks: dict[int, float | None]
    median_memory_error: float
    largest_memory_error: float


def totals(results: list[Result]) -> Totals:
    times, memories = ([abs(r.time_error) for r in results], [abs(r.memory_error) for r in results])
    counts = sorted({r.case.ranks for r in results})
    return Totals(
        statistics.median(times),
        max(times),
        _correlation(results),
        {n: _correlation([r for r in results if r.case.ranks == n]) for n in counts},
        statistics.median(memories),
        max(memories),
    )


def _correlation(results: list[Result]) -> float | None:
    return spearman([(r.measured.seconds, r.predicted.seconds) for r in results])


def line(r: Result) -> str:
    """A plan, as a line of the table."""
    p = r.predicted
    parts = (sum(group.values()) * 1e3 for group in (p.compute, p.exposed, p.other))
    most = sorted(p.memory.by_kind.items(), key=lambda kind: -kind[1])[:2]
    return (
        f"| {r.case.model} | {r.case.plan} | {r.case.ranks} | {r.measured.seconds * 1e3:.0f} "
        f"| {p.seconds * 1e3:.0f} | {r.time_error:+.0%} | {' | '.join(f'{ms:.0f}' for ms in parts)} "
        f"| {r.measured.peak / MIB:.2f} | {p.memory.peak / MIB:.2f} | {r.memory_error:+.1%} "
        f"| {', '.join(f'{kind} {size / MIB:.1f}' for kind, size in most)} |"
    )


def table(results: list[Result]) -> str:
    """All plans, and the totals in words."""
    lines = [
        "| model | plan | ranks | ms measured | predicted | error | compute | exposed | other "
        "| MiB measured | predicted | error | most of it |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|",
        *map(line, results),
    ]
    found = totals(results)
    within = ", ".join(f"{_figure(value)} of {n}" for n, value in found.spearman_by_ranks.items())
    return "\n".join(
        [
            *lines,
            "",
            f"Step time: Spearman {_figure(found.spearman)} over all {len(results)} plans ({within} ranks); error "
            f"{found.median_time_error:.0%} in the median, {found.largest_time_error:.0%} at most.",
            f"Peak memory: error {found.median_memory_error:.1%} in the median, "
            f"{found.largest_memory_error:.1%} at most.",
        ]
    )


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
