"""Joins analysis and runs into a verdict.

The analysis says what could be seen, a comparison of runs what is. A pair of runs that differ is a leak, whatever the
analysis says. What the analysis flags without a choice in between, and no pair shows, is a leak too, unless it must
have shown (:func:`_unshown`); what it flags
only by way of a choice (an order, an index, a comparison) is none, for there it says more than is true.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from meshwright.compiler.causality.analysing import (
    Analysis,
    analyse,
    read_by_others,
    unexercised,
    wide_pairs,
    with_layouts,
)
from meshwright.compiler.causality.edits import Base, base_values, row_of
from meshwright.compiler.causality.entering import where_it_enters
from meshwright.compiler.causality.feed import Feed, Role, Unfit, read_feed
from meshwright.compiler.causality.findings import findings_of
from meshwright.compiler.causality.interpreter import Notes
from meshwright.compiler.causality.probing import Place, Probed, everywhere, places_of, probe
from meshwright.compiler.causality.reaching import numbers_named
from meshwright.compiler.causality.relation import KINDS
from meshwright.compiler.causality.running import Subject, subject_of
from meshwright.compiler.causality.search import MANY_WEIGHTS, Case, Effort, Found, Search
from meshwright.compiler.causality.verdict import Judgement, Verdict, Witness, worse
from meshwright.compiler.causality.ways import Ways, ways_of

_HALF_BOUND = 2e-2
"""What half precision may be off by, of the largest element, where the analysis flags nothing."""

_MOST_TOKENS_BY_CHOICE = 128
"""Tokens of a batch up to which each place is tried that is flagged by way of a choice."""


@dataclass
class _Sought:
    """What the runs found of one way of the model."""

    found: Found
    probed: Probed
    keen: frozenset[str] = frozenset()
    """Kinds that the analysis flags in the model's own precision alone."""
    whole: bool = False
    """Whether the batch was changed at each of its positions."""
    vocabulary: dict[int, int] = field(default_factory=dict)


def judge(
    model: Callable[..., Any],
    batch: Any,
    *,
    batch_dim: int | None = 0,
    time_dim: int = 1,
    segments: Any = None,
    seconds: float = 20.0,
) -> Judgement:
    """Check one model. ``seconds`` bounds the search for a pair of runs; no exception of the model leaves it."""
    try:
        feed = read_feed(model, batch, batch_dim, time_dim, segments)
    except Unfit as fault:
        return _unknown(str(fault))
    try:
        subject = subject_of(model)
    except NotImplementedError as fault:  # weights on the meta device hold no numbers
        return _unknown(f"the model cannot be run: {fault}")
    with subject.restored(), torch.random.fork_rng(devices=[]):
        feed = with_layouts(subject, feed)
        analysis = analyse(subject, feed, seconds)
        if not analysis.feeds:
            return _unknown(analysis.failed or "the model does not run")
        ways = ways_of(subject, analysis.feeds[0], analysis.vocabulary)
        made = _one_way(subject, feed, analysis, ways, seconds)
        if ways.by_grad:
            subject.grad, subject.leaves_grad = True, ways.leaves_grad
            recorded = analyse(subject, feed, seconds)
            if recorded.feeds:
                ways = ways_of(subject, recorded.feeds[0], recorded.vocabulary)
                made = worse(made, _one_way(subject, feed, recorded, ways, seconds))
        return made


def _one_way(subject: Subject, feed: Feed, analysis: Analysis, ways: Ways, seconds: float) -> Judgement:
    sought = _search(subject, feed, analysis, ways, seconds)
    return _joined(subject, feed, analysis, ways, sought)


def _whole(subject: Subject, given: Feed, analysis: Analysis) -> list[Feed]:
    """The batch as given, for runs alone, if it is not too large and was not analysed."""
    size = (given.rows, given.length)
    large = given.rows * given.length > 2048 or sum(w.numel() for w in subject.own) > MANY_WEIGHTS
    return [] if large or any((f.rows, f.length) == size for f in analysis.feeds) else [given]


def _search(subject: Subject, given: Feed, analysis: Analysis, ways: Ways, seconds: float) -> _Sought:
    notes = analysis.notes()
    numbers = sorted(notes.numbers, key=abs)[:6]
    if notes.reads:
        numbers += [n for n in numbers_named(subject.function, subject.modules) if n not in numbers][: 8 - len(numbers)]
    flags = analysis.flags()
    seen = frozenset(kind for kind, flag in flags.items() if flag.hard)
    feeds = [*analysis.feeds, *_whole(subject, given, analysis)]
    search = Search(subject, feeds, analysis.vocabulary, numbers, seen)
    made = _Sought(search.found, Probed())
    strong = not any(True for _ in notes.assumptions)
    search.look(frozenset(), Effort(60, seconds / 4, strong))
    leaks = search.found.leaks
    if search.found.runs and not search.found.finite:
        return made
    if ways.by_dtype:
        both = wide_pairs(subject, analysis)
        made.keen = frozenset(kind for kind in seen - leaks.keys() if not both.get(kind, True))
        _narrowly(search, made, frozenset(seen - made.keen), strong, seconds)
    plateaus = any(r.alive for r in analysis.relations)
    made.probed = probe(search, _places(analysis, seen - made.keen - leaks.keys(), True), seconds, plateaus)
    wanted = frozenset(flags) - made.keen - leaks.keys()
    if notes.chosen or notes.reads or not analysis.relations or notes.unknown or ways.strangers:
        wanted = wanted | {k for k in KINDS if k != "document" or analysis.feeds[0].segments is not None}
    if wanted - leaks.keys():
        pairs = 500 if flags.keys() - leaks.keys() or not analysis.relations else 200
        search.look(frozenset(wanted), Effort(pairs, seconds, strong))
    soft = flags.keys() - seen - leaks.keys()
    probe(search, _places(analysis, soft, False), seconds / 8, plateaus)
    if (given.rows, given.length) not in {(r.rows, r.length) for r in analysis.relations}:
        made.whole = everywhere(search, given, seconds / 2)
    if ways.lasting is not None:
        _after_calls(search, strong, seconds / 8)
    for kind, case in list(leaks.items()):
        with _as_in(subject, case):
            leaks[kind] = search.smallest(case)
    return made


def _places(analysis: Analysis, kinds: frozenset[str] | set[str], hard: bool) -> list[Place]:
    made = []
    for relation, feed in zip(analysis.relations, analysis.related, strict=True):
        if hard or relation.rows * relation.length <= _MOST_TOKENS_BY_CHOICE:
            made += [p for kind in sorted(kinds) for p in places_of(relation, feed, kind, hard)]
    return made


def _narrowly(search: Search, made: _Sought, told: frozenset[str], strong: bool, seconds: float) -> None:
    """Runs in the model's own precision, whose path is another: of kinds that float64 does not tell of."""
    subject = search.subject
    other = replace(search, keen=made.keen, narrow_bound=_HALF_BOUND, found=Found())
    subject.wide = False
    try:
        other.look(frozenset(made.keen), Effort(80, seconds / 4, strong))
    finally:
        subject.wide = search.wide
    search.found.tests += other.found.tests
    for kind, case in other.found.leaks.items():
        if kind not in told:
            search.found.leaks.setdefault(kind, case)


def _after_calls(search: Search, strong: bool, seconds: float) -> None:
    """Runs of a model that finds what calls before have left."""
    feed = search.feeds[0]
    for calls in (1, 2, 9):
        search.subject.draw(0.0, 1.0, 0)
        with contextlib.suppress(Exception):  # whatever the user's model raises when it is called again
            values = base_values(feed, Base("random"), search.vocabulary, 77)
            with search.subject.after_calls(feed, values, calls):
                search.calls = calls
                search.look(frozenset(), Effort(16, seconds, strong))
    search.calls = 0


@contextlib.contextmanager
def _as_in(subject: Subject, case: Case) -> Iterator[None]:
    """The model in the precision and state of a case."""
    kept = subject.wide, subject.state
    subject.wide, subject.state = case.wide, case.state or subject.state
    try:
        yield
    finally:
        subject.wide, subject.state = kept


def _joined(subject: Subject, given: Feed, analysis: Analysis, ways: Ways, sought: _Sought) -> Judgement:
    flags, notes, found = analysis.flags(), analysis.notes(), sought.found
    leaks = set(found.leaks)
    rounding, unsettled = set(), set()
    for kind, flag in flags.items():
        if kind in leaks or not flag.hard:
            continue
        if kind in sought.keen:
            leaks.add(kind)
        elif sought.probed.untried(kind):
            unsettled.add(kind)
        elif kind in found.rounding:
            rounding.add(kind)
        elif not _unshown(subject, analysis, found, kind):
            leaks.add(kind)
    assumptions = _assumptions(subject, given, analysis, ways, sought)
    witnesses = []
    for _, case in sorted(found.leaks.items()):
        with _as_in(subject, case):
            witnesses.append(_witness(subject, case))
    reason = ""
    if found.runs and not found.finite:
        verdict, reason, leaks = Verdict.UNKNOWN, "all outputs are infinite or no numbers", set()
    elif leaks:
        verdict = Verdict.LEAK
    elif not analysis.relations:
        verdict, reason = Verdict.UNKNOWN, analysis.failed
    elif notes.unknown:
        verdict, reason = Verdict.UNKNOWN, "no rule for " + ", ".join(sorted(notes.unknown))
    elif unsettled:
        verdict = Verdict.UNKNOWN
        reason = (
            f"not every place was tried that the analysis flags ({', '.join(sorted(unsettled))}); allow more seconds"
        )
    elif assumptions:
        verdict = Verdict.ASSUMPTION
    elif rounding:
        verdict = Verdict.ROUNDING
    else:
        verdict = Verdict.CAUSAL
    lengths = tuple(sorted({r.length for r in analysis.relations}))
    made = Judgement(verdict, frozenset(leaks), tuple(assumptions), tuple(witnesses), (), reason, lengths, found.tests)
    return findings_of(made, flags, notes)


def _assumptions(subject: Subject, given: Feed, analysis: Analysis, ways: Ways, sought: _Sought) -> list[str]:
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


def _unknown(reason: str) -> Judgement:
    return findings_of(Judgement(Verdict.UNKNOWN, frozenset(), reason=reason), {}, Notes())
