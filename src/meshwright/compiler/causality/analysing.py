"""Runs with shadows at several sizes: short ones, longer than the windows met, and that of the batch itself."""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass, field, replace

from torch import Tensor

from meshwright.compiler.causality.edits import Base, Edit, base_values, edited
from meshwright.compiler.causality.feed import Feed, Layout, Role, Unfit
from meshwright.compiler.causality.interpreter import Notes
from meshwright.compiler.causality.outputs import layouts_of, named_tensors
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
    begun = time.monotonic()
    subject.draw(1.0, 1.0, 7)
    for rows, length in _sizes(given):
        if _try(subject, given, rows, length, made):
            break
    if not made.feeds:
        return made
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
    return made


def with_layouts(subject: Subject, given: Feed) -> Feed:
    """The feed with the outputs whose dims follow rows and positions, by runs at two lengths.

    As it was if the model takes one length alone.
    """
    subject.draw(0.0, 1.0, 0)
    met: list[tuple[int, int, dict[str, tuple[int, ...]]]] = []
    for rows, length in _sizes(given):
        if length not in {n for _, n, _ in met}:
            met += _shapes(subject, given, rows, length)
        if len(met) == 2:
            break
    if len(met) < 2:
        return given
    if given.batch_dim is not None:
        met += _shapes(subject, given, met[0][0] + 1, met[0][1])
    layouts = layouts_of(met, given)
    for name, layout in layouts.items():
        if layout.batch == layout.time and not _row_major(subject, given, name, layout, met[0][:2]):
            layouts[name] = replace(layout, row_major=not layout.row_major)
    return replace(given, layouts=layouts)


def _shapes(subject: Subject, given: Feed, rows: int, length: int) -> list[tuple[int, int, dict[str, tuple[int, ...]]]]:
    wide = subject.wide
    for subject.wide in dict.fromkeys((wide, False)):
        with contextlib.suppress(Exception):  # a size that cannot be made, or that the model refuses
            feed = resized(given, rows, length, {}, seed=length)
            returned = subject.call(feed, [leaf.value for leaf in feed.leaves])
            subject.wide = wide
            return [(rows, length, {name: tuple(v.shape) for name, v in named_tensors(returned)})]
    subject.wide = wide
    return []


def _row_major(subject: Subject, given: Feed, name: str, layout: Layout, size: tuple[int, int]) -> bool:
    """Whether the last token of the first row changes what the layout says is its output."""
    try:
        feed = replace(resized(given, *size, {}, 1), layouts={name: layout})
        values = base_values(feed, Base("random"), {}, 1)
        changed = edited(feed, values, Edit(0, (feed.length - 1,), "random"), {}, 2)
        one, other = subject.run(feed, values), subject.run(feed, changed)
    except Exception:  # whatever the user's model raises
        return True
    return not one.outputs or bool((one.outputs[0][0, -1] != other.outputs[0][0, -1]).any())


def _estimate(made: Analysis, rows: int, length: int) -> float:
    """Seconds that a size may take, by the last one: elements grow with the square of the length, sets with both."""
    if rows * length > MOST_BITS or not made.relations:
        return float("inf")
    last = made.related[-1]
    return made.seconds * (rows / last.rows) ** 2 * (length / last.length) ** 3 / 4


def _sizes(given: Feed) -> list[tuple[int, int]]:
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
            return False
    subject.notice_writes()
    for candidates in (True, False):
        begun = time.monotonic()
        try:
            relation = related(subject, feed, candidates)
        except Exception as fault:  # of the user's model, whose ops may do anything; it becomes UNKNOWN
            made.failed = f"the analysis stopped: {type(fault).__name__}: {fault}"
            continue
        if not relation.outputs:
            made.failed = "no output has the rows and positions of the input"
            return False
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
    with subject.prepared(feed, [leaf.value for leaf in feed.leaves], wide) as values:
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
        if leaf.role is Role.TOKENS and not leaf.value.is_floating_point() and leaf.value.numel():
            most = int(leaf.value.max())
            fitting = [rows for rows in notes.rows if rows > most]
            if fitting:
                made[number] = min(fitting)
    return made


def wide_pairs(subject: Subject, analysis: Analysis) -> dict[str, bool]:
    """By kind that is flagged without a choice: whether the analysis flags it in float64 too, at the same size."""
    made: dict[str, bool] = {}
    for relation, feed in zip(analysis.relations, analysis.related, strict=True):
        hard = [kind for kind, flag in relation.flags.items() if flag.hard and kind not in made]
        if not hard:
            continue
        try:
            other = related(subject, feed, wide=True)
        except Exception:  # whatever the user's model raises; then nothing is known of its way in float64
            continue
        for kind in hard:
            both = other.pairs.get((kind, True))
            made[kind] = both is not None and bool((both | ~relation.pairs[kind, True]).all())
    return made


def read_by_others(subject: Subject, analysis: Analysis) -> list[str]:
    """Names of inputs that are taken as given for what they hold, and that are seen from where they must not be."""
    made = []
    subject.draw(1.0, 1.0, 7)
    for feed in analysis.related[:1]:
        for leaf in feed.leaves:
            if not leaf.guessed:
                continue
            try:
                other = related(subject, feed.asking_for(leaf.name))
            except Exception:  # whatever the user's model raises
                continue
            if other.pairs:
                made.append(leaf.name)
    return made


def unexercised(subject: Subject, relation: Relation, feed: Feed, kind: str, tries: int = 9) -> bool:
    """Whether a kind is flagged only by way of elements that stood on a plateau in all runs."""
    alive: list[Tensor] = []
    for number in range(tries):
        subject.draw(*((1.0, (1.0, 4.0, 12.0)[number % 3], 50 + number) if subject.own else (0.0, 1.0, number)))
        other = resized(feed, feed.rows, feed.length, {}, 60 + number)
        try:
            met = related(subject, other).alive
        except Exception:  # whatever the user's model raises with these weights
            continue
        if not alive:
            alive = met
        elif [a.shape for a in alive] != [m.shape for m in met]:
            return False  # its way depends on tokens, so that runs cannot be laid over one another
        else:
            alive = [a | m for a, m in zip(alive, met, strict=True)]
    dead = [~a for a in alive]
    if not any(bool(d.any()) for d in dead):
        return False
    subject.draw(1.0, 1.0, 7)
    try:
        cut = related(subject, feed, dead=dead)
    except Exception:  # whatever the user's model raises
        return False
    kept = cut.pairs.get((kind, True))
    flagged = relation.pairs.get((kind, True))
    return flagged is not None and (kept is None or bool((flagged & ~kept).any()))
