"""Why not that plan: search again under the pin, and say by cause where it is worse or better."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from meshwright.compiler.diagnostics import MeshwrightError
from meshwright.compiler.search.differences import Differences, differences
from meshwright.compiler.search.infeasible import infeasible
from meshwright.compiler.search.limits import Limits
from meshwright.compiler.search.pins import Pins
from meshwright.compiler.search.prices import Priced
from meshwright.compiler.search.search import search
from meshwright.compiler.search.state import Search
from meshwright.compiler.search.telling import described, memory, percent, seconds


@dataclass(frozen=True)
class WhyNot:
    """The best plan under a pin, beside the chosen one."""

    pins: Pins
    plan: Priced | None
    """None if no plan keeps to the pin, or none that does fits; then ``failure`` says why."""
    differences: Differences | None
    failure: MeshwrightError | None
    sentences: tuple[str, ...]


def why_not(found: Search, pins: Pins) -> WhyNot:
    """Re-plan under the pin, in the limits of the search."""
    best = found.best
    assert best is not None, "only a plan that was found can be compared"
    limits = Limits(found.limits.reserve, pins, max(8, found.limits.budget // 2), found.limits.within)
    try:
        other = search(found.facts, found.cluster, found.ranks, limits, found.prices)
    except MeshwrightError as contradiction:
        return _failed(pins, contradiction)
    if other.best is None:
        return _failed(pins, infeasible(other))
    if other.best.candidate == best.candidate:
        return WhyNot(pins, other.best, None, None, (f"{pins.text} is what was chosen: {best.candidate}.",))
    found_differences = differences(best.prediction, other.best.prediction)
    return WhyNot(
        pins, other.best, found_differences, None, tuple(_sentences(best, other.best, pins, found_differences))
    )


def _failed(pins: Pins, failure: MeshwrightError) -> WhyNot:
    told = failure.diagnostics[0]
    more = [f"{line[0].upper()}{line[1:]}." for line in (*told.notes, told.action) if line]
    return WhyNot(pins, None, None, failure, (f"Not {pins.text}: {told.message}.", *more))


def _sentences(best: Priced, other: Priced, pins: Pins, by: Differences) -> Iterator[str]:
    share = other.seconds / best.seconds - 1
    relation = f"{percent(share)} slower" if share > 0 else f"{percent(-share)} faster, but less simple"
    yield (
        f"Not {pins.text}: the best with it is {described(other.candidate)} ({other.candidate}), "
        f"{seconds(other.seconds)} a step instead of {seconds(best.seconds)}: {relation}."
    )
    causes = [
        f"{_signed(s, seconds(abs(s)))} {cause}" for cause, s in by.by_cause.items() if abs(s) > 1e-3 * best.seconds
    ]
    if causes:
        yield f"Time by cause: {', '.join(causes)}."
    kinds = [f"{_signed(size, memory(abs(size)))} {kind}" for kind, size in list(by.by_kind.items())[:6]]
    yield f"Memory: {memory(other.memory)} instead of {memory(best.memory)}" + (
        f" ({', '.join(kinds)})." if kinds else "."
    )


def _signed(value: float, text: str) -> str:
    return ("+" if value > 0 else "-") + text
