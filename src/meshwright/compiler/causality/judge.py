"""Joins analysis and runs into a verdict.

The analysis says what could be seen, a comparison of runs what is. A pair of runs that differ is a leak, whatever the
analysis says. What the analysis flags without a choice in between, and no pair shows, is a leak too, unless it must
have shown (:func:`_unshown`); what it flags
only by way of a choice (an order, an index, a comparison) is none, for there it says more than is true.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from meshwright.compiler.causality.analysing import Analysis, analyse
from meshwright.compiler.causality.asking import read_by_others, unexercised
from meshwright.compiler.causality.cases import Case, Found
from meshwright.compiler.causality.clock import MORE_TIME, Clock, TimeIsUp
from meshwright.compiler.causality.edits import row_of
from meshwright.compiler.causality.entering import where_it_enters
from meshwright.compiler.causality.feed import Feed, Role, Unfit, read_feed
from meshwright.compiler.causality.findings import NO_NUMBERS, NO_TIME, findings_of, with_second
from meshwright.compiler.causality.interpreter import Notes
from meshwright.compiler.causality.layouts import with_layouts
from meshwright.compiler.causality.resizing import resized
from meshwright.compiler.causality.running import Subject, subject_of
from meshwright.compiler.causality.search import LEAST
from meshwright.compiler.causality.second.opinion import second_reading
from meshwright.compiler.causality.seeking import Sought, as_in, seek
from meshwright.compiler.causality.verdict import Judgement, Verdict, Witness, worse
from meshwright.compiler.causality.ways import Ways, ways_of

SECONDS = 20.0
"""What a check may take, if nothing else is said."""
_UNDIVIDED = (11, 53, 13, 17, 7, 23)


def judge(
    model: Callable[..., Any],
    batch: Any,
    *,
    batch_dim: int | None = 0,
    time_dim: int = 1,
    segments: Any = None,
    clock: Clock | None = None,
) -> Judgement:
    """Check one model, within the time of ``clock`` (20 seconds); no exception of the model leaves it."""
    clock = clock or Clock(SECONDS)
    try:
        feed = read_feed(model, batch, batch_dim, time_dim, segments)
        subject = subject_of(model)
    except Unfit as fault:
        return _unknown(str(fault), fault.action)
    subject.clock = clock
    with subject.restored(), torch.random.fork_rng(devices=[]):
        try:
            return _in_all_ways(subject, feed, clock)
        except TimeIsUp:
            return _unknown(clock.over, MORE_TIME)


def _in_all_ways(subject: Subject, feed: Feed, clock: Clock) -> Judgement:
    """In each way in which the model computes, and by the second reading. Raises TimeIsUp."""
    seconds = clock.seconds
    feed = with_layouts(subject, feed)
    analysis = analyse(subject, feed, seconds)
    if not analysis.feeds:
        return _unknown(analysis.failed or "the model does not run", analysis.action)
    ways = ways_of(subject, analysis.feeds[0], analysis.vocabulary)
    made = _one_way(subject, feed, analysis, ways, clock)
    if ways.by_grad:
        subject.grad, subject.leaves_grad = True, ways.leaves_grad
        recorded = analyse(subject, feed, seconds)
        if recorded.feeds:
            ways = ways_of(subject, recorded.feeds[0], recorded.vocabulary)
            made = worse(made, _one_way(subject, feed, recorded, ways, clock))
    subject.draw(1.0, 1.0, 7)
    subject.place(wide=False)
    return with_second(made, second_reading(subject.function, _for_second(feed, analysis), subject.addresses(), clock))


def _for_second(given: Feed, analysis: Analysis) -> Iterator[Feed]:
    """Lengths that divide nothing, so that no rule takes a dim apart; else those of the analysis."""
    for length in _UNDIVIDED:
        with contextlib.suppress(Unfit):
            yield resized(given, analysis.feeds[0].rows, length, analysis.vocabulary, seed=length)
    yield from analysis.feeds


def _one_way(subject: Subject, feed: Feed, analysis: Analysis, ways: Ways, clock: Clock) -> Judgement:
    sought = seek(subject, feed, analysis, ways, clock.seconds)
    subject.clock = Clock(clock.seconds)  # what was found is shown, however late it is
    try:
        return _joined(subject, feed, analysis, ways, sought)
    finally:
        subject.clock = clock


def _joined(subject: Subject, given: Feed, analysis: Analysis, ways: Ways, sought: Sought) -> Judgement:
    flags, notes, found = analysis.flags(), analysis.notes(), sought.found
    if sought.stopped and found.tests < LEAST and not found.leaks:
        return _unknown(f"{subject.clock.over} after {found.tests} pairs of runs", MORE_TIME)
    leaks = set(found.leaks)
    rounding, unsettled = set(), set()
    for kind, flag in flags.items():
        if kind in leaks or not flag.hard:
            continue
        if kind in sought.keen:
            leaks.add(kind)
        elif sought.stopped or sought.probed.untried(kind):
            unsettled.add(kind)
        elif kind in found.rounding:
            rounding.add(kind)
        elif not _unshown(subject, analysis, found, kind):
            leaks.add(kind)
    assumptions = _assumptions(subject, given, analysis, ways, sought)
    witnesses = []
    for _, case in sorted(found.leaks.items()):
        with as_in(subject, case):
            witnesses.append(_witness(subject, case))
    reason = action = ""
    if found.runs and not found.finite:
        verdict, reason, leaks = Verdict.UNKNOWN, NO_NUMBERS, set()
    elif leaks:
        verdict = Verdict.LEAK
    elif not analysis.relations:
        verdict, reason, action = Verdict.UNKNOWN, analysis.failed, analysis.action
    elif notes.unknown:
        verdict, reason = Verdict.UNKNOWN, "no rule for " + ", ".join(sorted(notes.unknown))
    elif unsettled:
        verdict, reason = Verdict.UNKNOWN, NO_TIME
    elif assumptions:
        verdict = Verdict.ASSUMPTION
    elif rounding:
        verdict = Verdict.ROUNDING
    else:
        verdict = Verdict.CAUSAL
    lengths = tuple(sorted({r.length for r in analysis.relations}))
    made = Judgement(
        verdict, frozenset(leaks), tuple(assumptions), tuple(witnesses), (), reason, action, lengths, found.tests
    )
    return findings_of(made, flags, notes)


def _assumptions(subject: Subject, given: Feed, analysis: Analysis, ways: Ways, sought: Sought) -> list[str]:
    """What must hold beyond what was seen."""
    notes, found = analysis.notes(), sought.found
    made = list(notes.assumptions)
    blind = [r.place for r in notes.reads if not found.varied(r.place.file, r.place.line)]
    if blind:
        where = f"{blind[0].file}:{blind[0].line}" if blind[0].file else "the model"
        made.append(f"control flow that depends on values goes as in the runs made ({where})")
    if ways.strangers is not None:
        place = ways.strangers
        where = f"{place.file}:{place.line}" if place.file else "the model"
        made.append(f"numbers that leave torch and come back carry nothing to where it must not be seen ({where})")
    if ways.lasting is not None:
        made.append(f"each call finds the state as given, not what the one before it left ({ways.lasting})")
    for name in read_by_others(subject, analysis):
        made.append(f"the input '{name}' is a mask or the like, which any position may see")
    if (blank := sought.probed.blank()) is not None:
        made.append(f"what was no number in all runs is none (position {blank})")
    if found.unsteady:
        made.append("what differs between runs of the same tokens is chance")
    sizes = {(r.rows, r.length) for r in analysis.relations}
    if sizes and (given.rows, given.length) not in sizes and not sought.whole:
        looked = ", ".join(str(n) for n in sorted({n for _, n in sizes}))
        made.append(f"{given.rows} rows of {given.length} positions behave as those of lengths {looked}")
    return made


def _unshown(subject: Subject, analysis: Analysis, found: Found, kind: str) -> bool:
    """Whether what the analysis flags, and no pair of runs shows, not even as rounding, is exactly nothing.

    It is, if it would vary with the tokens whatever it is: if nothing is rounded to whole numbers, all weights were
    drawn anew, all features were numbers, and none of it comes only through what stood on a plateau in all runs.
    """
    notes = analysis.notes()
    drawn = bool(subject.own) or not subject.parameters
    if notes.steps or notes.foreign or not drawn or not all(bool(f.all()) for f in found.features.values()):
        return False
    return not any(
        r.alive and (kind, True) in r.pairs and unexercised(subject, r, f, kind)
        for r, f in zip(analysis.relations, analysis.related, strict=True)
    )


def _witness(subject: Subject, case: Case) -> Witness:
    op, place = where_it_enters(subject, case)
    subject.draw(*case.weights)
    row, time = case.output
    shown: list[tuple[float, ...]] = []
    for values in (case.values_a, case.values_b):
        ran = subject.run(case.feed, values)
        position = time + ran.offsets[case.which]
        shown.append(tuple(ran.outputs[case.which][row, position, :8].tolist()))
    changed = [p for p in case.edit.positions if case.kind != "future" or p > time]
    leaf = next(i for i, one in enumerate(case.feed.leaves) if one.role is Role.TOKENS)
    rows = [_tokens(case, values[leaf]) for values in (case.values_a, case.values_b)]
    return Witness(
        kind=case.kind,
        output=case.output,
        input=(case.edit.row, changed[0] if changed else case.edit.positions[0]),
        batch_a=case.feed.filled(case.values_a),
        batch_b=case.feed.filled(case.values_b),
        tokens_a=rows[0],
        tokens_b=rows[1],
        value_a=shown[0],
        value_b=shown[1],
        difference=case.difference,
        own_weights=case.weights[:2] == (0.0, 1.0),
        segments=case.feed.segments,
        calls=case.calls,
        op=op,
        place=place,
    )


def _tokens(case: Case, value: Any) -> tuple[Any, ...]:
    row = row_of(value, case.feed, case.edit.row)
    return tuple(row.reshape(row.shape[0], -1)[:, 0].tolist())


def _unknown(reason: str, action: str = "") -> Judgement:
    return findings_of(Judgement(Verdict.UNKNOWN, frozenset(), reason=reason, action=action), {}, Notes())
