"""Runs with shadows at several sizes: short ones, longer than the windows met, and that of the batch itself."""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass, field

from torch import Tensor

from meshwright.compiler.causality.clock import MORE_TIME, TimeIsUp
from meshwright.compiler.causality.feed import Feed, Role, Unfit
from meshwright.compiler.causality.fitting import action_of
from meshwright.compiler.causality.interpreter import Notes
from meshwright.compiler.causality.relation import MOST_BITS, Flag, Relation, relate
from meshwright.compiler.causality.resizing import resized
from meshwright.compiler.causality.running import Subject

_SHORT = (12, 16, 24, 10, 8, 32, 6, 9, 20, 48, 64, 4, 128)
_LONGEST = 96
_MANY_DOCUMENTS = (39, 19)
"""A length and how many documents are in it: ids that are compared by a few of their bits are then alike."""


@dataclass
class Analysis:
    """What the runs with shadows found, over all sizes."""

    relations: list[Relation] = field(default_factory=list)
    related: list[Feed] = field(default_factory=list)
    """The feed of each relation."""
    feeds: list[Feed] = field(default_factory=list)
    """All that the model takes, those included whose analysis failed."""
    vocabulary: dict[int, int] = field(default_factory=dict)
    failed: str = ""
    action: str = ""
    """What to do about what failed; empty for what the model itself raises."""
    seconds: float = 0.0
    """How long the last one took."""

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


def analyse(subject: Subject, given: Feed, seconds: float) -> Analysis:
    """At three lengths or more, and at the size given if that can be done in the time."""
    made = Analysis()
    with contextlib.suppress(TimeIsUp):  # what there is counts
        _at_sizes(subject, given, seconds, made)
    if not made.feeds and subject.clock.late:
        made.failed, made.action = f"{subject.clock.over} before it was run at any size", MORE_TIME
    return made


def _at_sizes(subject: Subject, given: Feed, seconds: float, made: Analysis) -> None:
    begun = time.monotonic()
    subject.draw(1.0, 1.0, 7)
    for rows, length in sizes(given):
        if _try(subject, given, rows, length, made):
            break
    if not made.feeds:
        return
    first = made.feeds[0]
    made.vocabulary = _vocabulary(given, made.notes())
    span = max((s for s in made.notes().spans if s <= _LONGEST // 2), default=0)
    for length in (2 * span + 3, first.length + 5, 2 * first.length, 3 * first.length):
        if len(made.relations) >= 3 or time.monotonic() - begun > seconds:
            break
        if first.length < length <= _LONGEST and length not in {f.length for f in made.feeds}:
            _try(subject, given, first.rows, length, made)
    done = {(f.rows, f.length) for f in made.feeds}
    if given.segments is not None and _estimate(made, first.rows, _MANY_DOCUMENTS[0]) < seconds / 4:
        _try(subject, given, first.rows, _MANY_DOCUMENTS[0], made, _MANY_DOCUMENTS[1])
    for rows, length in dict.fromkeys([(given.rows, given.length), (first.rows, given.length), (given.rows, 12)]):
        left = seconds - (time.monotonic() - begun)
        if (rows, length) not in done and _estimate(made, rows, length) < left / 3:
            done.add((rows, length))
            if _try(subject, given, rows, length, made) and (rows, length) == (given.rows, given.length):
                break


def _estimate(made: Analysis, rows: int, length: int) -> float:
    """Seconds that a size may take, by the last one: elements grow with the square of the length, sets with both."""
    if rows * length > MOST_BITS or not made.relations:
        return float("inf")
    last = made.related[-1]
    return made.seconds * (rows / last.rows) ** 2 * (length / last.length) ** 3 / 4


def sizes(given: Feed) -> list[tuple[int, int]]:
    """Rows and lengths to try, the most telling first."""
    lengths = [n for n in _SHORT if n <= max(given.length, 12)]
    lengths += [given.length // k for k in (2, 4, 8) if given.length % k == 0 and given.length // k > 2]
    rows = 2 if given.batch_dim is not None else 1
    made = [(rows, n) for n in dict.fromkeys(lengths)]
    if given.rows != rows:
        made += [(given.rows, n) for n in dict.fromkeys(lengths)]
    return [*made, (rows, given.length), (given.rows, given.length)]


def _try(subject: Subject, given: Feed, rows: int, length: int, made: Analysis, documents: int | None = None) -> bool:
    """Analyse at one size; the size is kept if the model accepts it."""
    try:
        feed = resized(given, rows, length, made.vocabulary, length, documents)
    except Unfit as fault:
        made.failed = made.failed or str(fault)
        return False
    wide = subject.wide
    try:
        subject.run(feed, [leaf.value for leaf in feed.leaves])
    except Exception:  # whatever the user's model raises in float64
        subject.wide = False
        try:
            subject.run(feed, [leaf.value for leaf in feed.leaves])
        except Exception as fault:  # whatever the user's model raises
            subject.wide = wide
            made.failed = f"the model does not run on {rows} rows of {length}: {type(fault).__name__}: {fault}"
            made.action = action_of(fault)
            return False
    subject.notice_writes()
    for candidates in (True, False):
        begun = time.monotonic()
        try:
            relation = related(subject, feed, candidates)
        except Unfit as fault:
            made.failed, made.action = str(fault), fault.action
            return False
        except Exception as fault:  # of the user's model, whose ops may do anything; it becomes UNKNOWN
            made.failed = f"the analysis stopped: {type(fault).__name__}: {fault}"
            continue
        made.seconds = time.monotonic() - begun
        made.relations.append(relation)
        made.related.append(feed)
        break
    made.feeds.append(feed)
    return True


def related(
    subject: Subject, feed: Feed, candidates: bool = True, *, wide: bool = False, dead: list[Tensor] | None = None
) -> Relation:
    """One run with shadows, with the weights drawn last. Raises what the model raises."""
    name = f"the analysis, on {feed.rows} rows of {feed.length}"
    prepared = subject.prepared(feed, [leaf.value for leaf in feed.leaves], wide)
    with subject.clock.run(name, least=True), prepared as values:
        return relate(
            subject.function,
            feed.with_values(values, feed.rows, feed.length, feed.segments),
            subject.addresses(),
            candidates,
            grad=subject.grad,
            dead=dead or (),
        )


def _vocabulary(given: Feed, notes: Notes) -> dict[int, int]:
    """By leaf: below which number its tokens are, as the tables that they read say."""
    made = {}
    for number, leaf in enumerate(given.leaves):
        if (
            leaf.role is Role.TOKENS
            and not (leaf.value.is_floating_point() or leaf.value.is_complex())
            and leaf.value.numel()
        ):
            most = int(leaf.value.max())
            fitting = [rows for rows in notes.rows if rows > most]
            if fitting:
                made[number] = min(fitting)
    return made
