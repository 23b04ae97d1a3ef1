"""Joins analysis and runs into a verdict.

The analysis says what could be seen, a comparison of runs what is. A pair of runs that differ is a leak, whatever the
analysis says. What the analysis flags without a choice in between, and no pair shows, is a leak too, unless it must
have shown (:func:`_cancels`); what it flags
only by way of a choice (an order, an index, a comparison) is none, for there it says more than is true.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from meshwright.compiler.causality.clock import Clock, TimeIsUp
from meshwright.compiler.causality.edits import row_of
from meshwright.compiler.causality.entering import where_it_enters
from meshwright.compiler.causality.feed import Feed, Role, Unfit, read_feed
from meshwright.compiler.causality.findings import findings_of, with_second
from meshwright.compiler.causality.fitting import action_of
from meshwright.compiler.causality.interpreter import Notes
from meshwright.compiler.causality.relation import KINDS, Flag, Relation, relate
from meshwright.compiler.causality.resizing import resized
from meshwright.compiler.causality.running import Subject, subject_of
from meshwright.compiler.causality.search import LEAST, MANY_WEIGHTS, Case, Effort, Found, Search
from meshwright.compiler.causality.second.opinion import second_reading
from meshwright.compiler.causality.verdict import Judgement, Verdict, Witness

_SHORT = (12, 16, 24, 10, 8, 32, 6, 9, 20, 48, 64, 4, 128)
_UNDIVIDED = (11, 13, 17, 7, 23)
_LONGEST = 96
SECONDS = 20.0
"""What a check may take, if nothing else is said."""
ANALYSIS = 0.5
"""Of that, when no further length is analysed."""
MORE_TIME = "give it more seconds, or a smaller model or batch"
ENOUGH = 100
"""Pairs of runs without any difference after which a smooth function is taken not to depend at all."""


@dataclass
class _Analysis:
    """What the runs with shadows found, over all lengths."""

    relations: list[Relation]
    feeds: list[Feed]
    vocabulary: dict[int, int]
    failed: str = ""
    action: str = ""
    """What to do about that."""

    def flags(self) -> dict[str, Flag]:
        made: dict[str, Flag] = {}
        for relation in self.relations:
            for kind, flag in relation.flags.items():
                if kind not in made or (flag.hard and not made[kind].hard):
                    made[kind] = flag
        return made

    def notes(self) -> Notes:
        made = Notes()
        for relation in self.relations:
            made.assumptions.update(relation.notes.assumptions)
            made.unknown.update(relation.unknown)
            made.reads.extend(relation.notes.reads)
            made.chosen = made.chosen or relation.notes.chosen
            made.steps = made.steps or relation.notes.steps
            made.foreign = made.foreign or relation.notes.foreign
            made.numbers |= relation.notes.numbers
            made.spans |= relation.notes.spans
            made.rows |= relation.notes.rows
        return made


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
        analysis = _analyse(subject, feed)
        if not analysis.feeds:
            return _unknown(analysis.failed or "the model does not run", analysis.action)
        found = _search(subject, feed, analysis)
        joined = _joined(subject, analysis, found)
        subject.place(wide=False)
        return with_second(
            joined, second_reading(subject.function, _for_second(feed, analysis), subject.addresses(), clock)
        )


def _for_second(given: Feed, analysis: _Analysis) -> Iterator[Feed]:
    """Lengths that divide nothing, so that no rule takes a dim apart; else those of the analysis."""
    for length in _UNDIVIDED:
        with contextlib.suppress(Unfit):
            yield resized(given, analysis.feeds[0].rows, length, analysis.vocabulary, seed=length)
    yield from analysis.feeds


def _analyse(subject: Subject, given: Feed) -> _Analysis:
    made = _Analysis([], [], {})
    try:
        _at_sizes(subject, given, made)
    except TimeIsUp:
        if not made.feeds:
            made.failed, made.action = f"{_over(subject.clock)} before it was run at any size", MORE_TIME
    return made


def _at_sizes(subject: Subject, given: Feed, made: _Analysis) -> None:
    subject.draw(1.0, 1.0, 7)
    for rows, length in _sizes(given):
        if _try(subject, given, rows, length, made):
            break
    if not made.feeds:
        return
    first = made.feeds[0]
    made.vocabulary = _vocabulary(given, made.notes())
    span = max((s for s in made.notes().spans if s <= _LONGEST // 2), default=0)
    for length in (2 * span + 3, first.length + 5, 2 * first.length, 3 * first.length):
        if len(made.relations) >= 3 or subject.clock.passed > ANALYSIS:
            break
        if first.length < length <= _LONGEST and length not in {f.length for f in made.feeds}:
            _try(subject, given, first.rows, length, made)
    if (
        subject.clock.passed < ANALYSIS
        and (given.rows, given.length) != (first.rows, first.length)
        and given.rows * given.length <= 256
    ):
        _try(subject, given, given.rows, given.length, made)


def _sizes(given: Feed) -> list[tuple[int, int]]:
    lengths = [n for n in _SHORT if n <= max(given.length, 12)]
    lengths += [given.length // k for k in (2, 4, 8) if given.length % k == 0 and given.length // k > 2]
    rows = 2 if given.batch_dim is not None else 1
    made = [(rows, n) for n in dict.fromkeys(lengths)]
    if given.rows != rows:
        made += [(given.rows, n) for n in dict.fromkeys(lengths)]
    return [*made, (rows, given.length), (given.rows, given.length)]


def _try(subject: Subject, given: Feed, rows: int, length: int, made: _Analysis) -> bool:
    """Analyse at one size; the size is kept if the model accepts it."""
    try:
        feed = resized(given, rows, length, made.vocabulary, seed=length)
    except Unfit as fault:
        made.failed = made.failed or str(fault)
        return False
    try:
        subject.run(feed, [leaf.value for leaf in feed.leaves])
    except Exception:  # whatever the user's model raises in float64
        subject.wide = False
        try:
            subject.run(feed, [leaf.value for leaf in feed.leaves])
        except Exception as fault:  # whatever the user's model raises
            subject.wide = not made.feeds or made.feeds[0] is feed
            made.failed = f"the model does not run on {rows} rows of {length}: {type(fault).__name__}: {fault}"
            made.action = action_of(fault)
            return False
    subject.notice_writes()
    for candidates in (True, False):
        subject.place(wide=False)
        torch.manual_seed(0)
        try:
            with subject.clock.run(f"the analysis, on {rows} rows of {length}", least=True):
                relation = relate(subject.function, feed, subject.addresses(), candidates)
        except Unfit as fault:
            made.failed, made.action = str(fault), fault.action
            return False
        except Exception as fault:  # of the user's model, whose ops may do anything; it becomes UNKNOWN
            made.failed = f"the analysis stopped: {type(fault).__name__}: {fault}"
            continue
        made.relations.append(relation)
        break
    made.feeds.append(feed)
    return True


def _vocabulary(given: Feed, notes: Notes) -> dict[int, int]:
    """By leaf: below which number its tokens are, as the tables that they read say."""
    made = {}
    for number, leaf in enumerate(given.leaves):
        if leaf.role is Role.TOKENS and not _is_real(leaf.value) and leaf.value.numel():
            most = int(leaf.value.max())
            fitting = [rows for rows in notes.rows if rows > most]
            if fitting:
                made[number] = min(fitting)
    return made


def _is_real(value: torch.Tensor) -> bool:
    return value.is_floating_point() or value.is_complex()


def _whole(subject: Subject, given: Feed, analysis: _Analysis) -> list[Feed]:
    """The batch as given, for runs alone, if it is not too large and was not analysed."""
    size = (given.rows, given.length)
    large = given.rows * given.length > 2048 or sum(w.numel() for w in subject.own) > MANY_WEIGHTS
    return [] if large or any((f.rows, f.length) == size for f in analysis.feeds) else [given]


def _search(subject: Subject, given: Feed, analysis: _Analysis) -> Found:
    notes = analysis.notes()
    numbers = sorted(notes.numbers, key=abs)[:6]
    flags = analysis.flags()
    seen = frozenset(kind for kind, flag in flags.items() if flag.hard)
    search = Search(subject, [*analysis.feeds, *_whole(subject, given, analysis)], analysis.vocabulary, numbers, seen)
    strong = not any(True for _ in notes.assumptions)
    with contextlib.suppress(TimeIsUp):
        _look(search, flags, notes, analysis, strong)
    for kind, case in list(search.found.leaks.items()):
        search.found.leaks[kind] = search.smallest(case)
    return search.found


def _look(search: Search, flags: dict[str, Flag], notes: Notes, analysis: _Analysis, strong: bool) -> None:
    clock = search.subject.clock
    search.look(frozenset(), Effort(60, min(clock.seconds / 4, clock.left), strong))
    wanted = frozenset(flags) - search.found.leaks.keys()
    if notes.chosen or notes.reads or not analysis.relations or notes.unknown:
        wanted = wanted | {k for k in KINDS if k != "document" or analysis.feeds[0].segments is not None}
    if wanted - search.found.leaks.keys():
        pairs = 500 if flags.keys() - search.found.leaks.keys() or not analysis.relations else 200
        search.look(frozenset(wanted), Effort(pairs, clock.left, strong))


def _joined(subject: Subject, analysis: _Analysis, found: Found) -> Judgement:
    flags, notes = analysis.flags(), analysis.notes()
    if subject.clock.late and found.tests < LEAST and not found.leaks:
        return _unknown(f"{_over(subject.clock)} after {found.tests} pairs of runs", MORE_TIME)
    leaks = set(found.leaks)
    rounding = set()
    for kind, flag in flags.items():
        if kind in leaks or not flag.hard:
            continue
        if kind in found.rounding:
            rounding.add(kind)
        elif not _cancels(subject, notes, found):
            leaks.add(kind)
    assumptions = list(notes.assumptions)
    for name in analysis.feeds[0].guessed:
        assumptions.append(f"'{name}', which held nothing but zeros and ones and was not varied, tells no token")
    if notes.reads and not found.other_path:
        place = notes.reads[0].place
        where = f"{place.file}:{place.line}" if place.file else "the model"
        assumptions.append(f"control flow that depends on values goes as in the runs made ({where})")
    witnesses = tuple(_witness(subject, case) for _, case in sorted(found.leaks.items()))
    reason = action = ""
    if leaks:
        verdict = Verdict.LEAK
    elif not analysis.relations:
        verdict, reason, action = Verdict.UNKNOWN, analysis.failed, analysis.action
    elif notes.unknown:
        verdict, reason = Verdict.UNKNOWN, "no rule for " + ", ".join(sorted(notes.unknown))
    elif assumptions:
        verdict = Verdict.ASSUMPTION
    elif rounding:
        verdict = Verdict.ROUNDING
    else:
        verdict = Verdict.CAUSAL
    lengths = tuple(sorted({r.length for r in analysis.relations}))
    made = Judgement(verdict, frozenset(leaks), tuple(assumptions), witnesses, (), reason, action, lengths, found.tests)
    return findings_of(made, flags, notes)


def _cancels(subject: Subject, notes: Notes, found: Found) -> bool:
    """Whether what the analysis flags, and no pair of runs shows, not even as rounding, is exactly nothing.

    It is, if it would vary with the tokens whatever it is: if nothing is rounded to whole numbers, all weights were
    drawn anew, and there were enough pairs.
    """
    drawn = bool(subject.own) or not subject.parameters
    return not notes.steps and not notes.foreign and drawn and found.tests >= ENOUGH


def _witness(subject: Subject, case: Case) -> Witness:
    op, place = where_it_enters(subject, case)
    subject.clock = Clock()  # what was found is shown, however late it is
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
        op=op,
        place=place,
    )


def _tokens(case: Case, value: Any) -> tuple[Any, ...]:
    row = row_of(value, case.feed, case.edit.row)
    return tuple(row.reshape(row.shape[0], -1)[:, 0].tolist())


def _unknown(reason: str, action: str = "") -> Judgement:
    return findings_of(Judgement(Verdict.UNKNOWN, frozenset(), reason=reason, action=action), {}, Notes())


def _over(clock: Clock) -> str:
    return f"its {clock.seconds:g} seconds, and as many again, were over"
