"""Looks for pairs of runs that show a leak: what is flagged first, each place of it, then what runs alone can see."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace

from meshwright.compiler.causality.analysing import Analysis
from meshwright.compiler.causality.asking import wide_pairs
from meshwright.compiler.causality.cases import Case, Effort, Found
from meshwright.compiler.causality.clock import TimeIsUp
from meshwright.compiler.causality.edits import Base, base_values
from meshwright.compiler.causality.feed import Feed, Unfit
from meshwright.compiler.causality.probing import Place, Probed, everywhere, places_of, probe
from meshwright.compiler.causality.reaching import numbers_named
from meshwright.compiler.causality.reducing import smallest
from meshwright.compiler.causality.relation import KINDS
from meshwright.compiler.causality.resizing import resized
from meshwright.compiler.causality.running import Subject
from meshwright.compiler.causality.search import MANY_WEIGHTS, Search
from meshwright.compiler.causality.ways import Ways

_HALF_BOUND = 2e-2
"""What half precision may be off by, of the largest element, where the analysis flags nothing."""

_LARGE = 2048
"""Tokens of a batch beyond which not all of its positions are tried in all of its rows."""

_MOST_TOKENS_BY_CHOICE = 128
"""Tokens of a batch up to which each place is tried that is flagged by way of a choice."""


@dataclass
class Sought:
    """What the runs found of one way of the model."""

    found: Found
    probed: Probed
    keen: frozenset[str] = frozenset()
    """Kinds that the analysis flags in the model's own precision alone."""
    whole: bool = False
    """Whether the batch was changed at each of its positions."""
    stopped: bool = False
    """Whether time was up before all was tried."""


def _whole(subject: Subject, given: Feed, analysis: Analysis) -> list[Feed]:
    """The batch as given, for runs alone, if it is not too large and was not analysed."""
    size = (given.rows, given.length)
    large = given.rows * given.length > 2048 or sum(w.numel() for w in subject.own) > MANY_WEIGHTS
    return [] if large or any((f.rows, f.length) == size for f in analysis.feeds) else [given]


def seek(subject: Subject, given: Feed, analysis: Analysis, ways: Ways, seconds: float) -> Sought:
    """All that runs show of one way of the model. ``seconds`` bounds each part."""
    notes = analysis.notes()
    numbers = sorted(notes.numbers, key=abs)[:6]
    if notes.reads:
        numbers += [n for n in numbers_named(subject.function, subject.modules) if n not in numbers][: 8 - len(numbers)]
    flags = analysis.flags()
    seen = frozenset(kind for kind, flag in flags.items() if flag.hard)
    feeds = [*analysis.feeds, *_whole(subject, given, analysis)]
    search = Search(subject, feeds, analysis.vocabulary, numbers, seen)
    made = Sought(search.found, Probed())
    try:
        _all_ways(search, made, given, analysis, ways, seconds)
    except TimeIsUp:
        made.stopped = True
    for kind, case in list(search.found.leaks.items()):
        with as_in(subject, case):
            search.found.leaks[kind] = smallest(search, case)
    return made


def _all_ways(search: Search, made: Sought, given: Feed, analysis: Analysis, ways: Ways, seconds: float) -> None:
    """Raises TimeIsUp."""
    notes, flags, seen = analysis.notes(), analysis.flags(), search.seen
    strong = not any(True for _ in notes.assumptions)
    search.look(frozenset(), Effort(60, seconds / 4, strong))
    leaks = search.found.leaks
    if search.found.runs and not search.found.finite:
        return
    if ways.by_dtype:
        both = wide_pairs(search.subject, analysis)
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
        made.whole = all(everywhere(search, one, seconds) for one in _as_large(given, analysis))
    if ways.lasting is not None:
        _after_calls(search, strong, seconds / 8)


def _as_large(given: Feed, analysis: Analysis) -> list[Feed]:
    """The batch; of a very large one as many positions in few rows, and as many rows of few positions."""
    first = analysis.feeds[0]
    if given.rows * given.length <= _LARGE:
        return [given]
    made = []
    for rows, length in ((min(first.rows, given.rows), given.length), (given.rows, min(first.length, given.length))):
        with contextlib.suppress(Unfit):  # then it is tried as it is
            made.append(resized(given, rows, length, analysis.vocabulary, length))
    return made if len(made) == 2 else [given]


def _places(analysis: Analysis, kinds: frozenset[str] | set[str], hard: bool) -> list[Place]:
    made = []
    for relation, feed in zip(analysis.relations, analysis.related, strict=True):
        if hard or relation.rows * relation.length <= _MOST_TOKENS_BY_CHOICE:
            made += [p for kind in sorted(kinds) for p in places_of(relation, feed, kind, hard)]
    return made


def _narrowly(search: Search, made: Sought, told: frozenset[str], strong: bool, seconds: float) -> None:
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
def as_in(subject: Subject, case: Case) -> Iterator[None]:
    """The model in the precision and state of a case."""
    kept = subject.wide, subject.state
    subject.wide, subject.state = case.wide, case.state or subject.state
    try:
        yield
    finally:
        subject.wide, subject.state = kept
