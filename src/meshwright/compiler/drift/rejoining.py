"""Where two ways to compute come together again: the ops that all which comes of a difference must go through."""

from __future__ import annotations

import math
from collections.abc import Iterable

from meshwright.compiler.drift.aligning import Block, Pair
from meshwright.compiler.drift.step import Trace


def reached(trace: Trace, starts: Iterable[int]) -> list[int]:
    """The live steps that some steps lead to, with these, in the order of the run."""
    found = set(starts)
    for step in trace.steps:
        if step.number in trace.live and step.sources & found:
            found.add(step.number)
    return sorted(found)


def cuts(trace: Trace, starts: Iterable[int]) -> set[int]:
    """Those of the reached steps that every way from the first ones to the outputs goes through."""
    found: set[int] = set()
    most = 0.0
    for number in reached(trace, starts):
        if most <= number:
            found.add(number)
        users = [step.number for step in trace.users.get(number, ())]
        most = max(most, math.inf if number in trace.ends or not users else max(users))
    return found


def after(
    aligned: list[Pair | Block], number: int, training: Trace, evaluation: Trace
) -> tuple[list[Pair], list[Pair]]:
    """Of the pairs behind an entry those that it leads to, and of these the ones that all which it leads to goes
    through: if the two runs are alike there, they compute the same."""
    entry = aligned[number]
    first = {entry.first.number} if isinstance(entry, Pair) else {s.number for s in entry.first}
    second = {entry.second.number} if isinstance(entry, Pair) else {s.number for s in entry.second}
    led = set(reached(evaluation, second)) if second else set(reached(training, first))
    through = cuts(evaluation, second) if second else cuts(training, first)
    behind = [
        (one, one.second.number if second else one.first.number)
        for one in aligned[number + 1 :]
        if isinstance(one, Pair)
    ]
    return [one for one, at in behind if at in led], [one for one, at in behind if at in through]
