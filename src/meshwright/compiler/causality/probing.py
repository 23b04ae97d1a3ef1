"""Tries the places that the analysis flags one by one, and every position of a batch that was too large to analyse.

A leak may be confined to one place: a wrong element of a mask, the border of a chunk. Changes at a few cuts pass it
by. So from the flagged pairs of output and input those changes are made that touch each pair, and only they say
anything of it: a later token that an output of its row may see is changed at a cut between the two, a row or a
document with all that others may see of it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from meshwright.compiler.causality.clock import LEAST_SECONDS
from meshwright.compiler.causality.edits import Base, Edit, base_values
from meshwright.compiler.causality.feed import Feed
from meshwright.compiler.causality.relation import Relation
from meshwright.compiler.causality.running import Ran
from meshwright.compiler.causality.search import MANY_WEIGHTS, Search
from meshwright.compiler.causality.typed import distinct

ENOUGH = 3
"""Pairs of runs that touch a place and agree to the last digit, after which a smooth function is taken not to depend.

Weights, tokens and the change are drawn anew for each, so that one would do but for the digits of a number.
"""

_MANY = 200
"""Places beyond which special tokens and strong weights are left out once each was tried often enough."""

Setting = tuple[tuple[float, float, int], Base]


@dataclass
class Place:
    """A change that touches flagged pairs: ``outputs`` ``[rows, positions]`` may see what ``edit`` changes."""

    kind: str
    feed: Feed
    edit: Edit
    outputs: Tensor
    agreed: Tensor
    """By output ``[rows, positions]``: pairs of runs that compared numbers there."""
    runs: int = 0

    def untried(self) -> bool:
        """Whether some output that is ever a number was not compared often enough."""
        return self.runs < ENOUGH or bool((self.outputs & (self.agreed > 0) & (self.agreed < ENOUGH)).any())


@dataclass
class Probed:
    """What is left of the places of each kind."""

    places: list[Place] = field(default_factory=list)

    def untried(self, kind: str) -> bool:
        """Whether some place of a kind was not tried often enough."""
        return any(p.kind == kind and p.untried() for p in self.places)

    def blank(self) -> int | None:
        """A position that was tried, but was no number in any run."""
        for place in self.places:
            never = (place.outputs & (place.agreed == 0)).nonzero()
            if place.runs >= ENOUGH and never.shape[0]:
                return int(never[0, 1])
        return None


def places_of(relation: Relation, feed: Feed, kind: str, hard: bool) -> Iterator[Place]:
    """The changes by which every flagged pair of a kind is touched, as few as possible."""
    pairs = relation.pairs.get((kind, hard))
    if pairs is None:
        return
    for row in range(feed.rows):
        if kind == "batch":
            seen = pairs[:, :, row]
            yield from _place(kind, feed, row, seen.flatten(0, 1).any(0), seen.any(-1))
            continue
        own = pairs[row, :, row]  # [outputs, inputs]
        if kind == "document":
            assert feed.segments is not None
            for one in distinct(feed.segments[row]).tolist():
                seen = own & (feed.segments[row] == one)[None]
                yield from _place(kind, feed, row, seen.any(0), _in_row(feed, row, seen.any(1)))
            continue
        for cut in _cuts(own):
            inside = own[: cut + 1, cut + 1 :]
            sources, outputs = torch.zeros((2, feed.length), dtype=torch.bool)
            sources[cut + 1 :], outputs[: cut + 1] = inside.any(0), inside.any(1)
            yield from _place(kind, feed, row, sources, _in_row(feed, row, outputs))


def _place(kind: str, feed: Feed, row: int, sources: Tensor, outputs: Tensor) -> Iterator[Place]:
    if bool(sources.any()):
        positions = tuple(sources.nonzero()[:, 0].tolist())
        yield Place(kind, feed, Edit(row, positions, "random"), outputs, torch.zeros_like(outputs, dtype=torch.int64))


def _in_row(feed: Feed, row: int, outputs: Tensor) -> Tensor:
    made = torch.zeros((feed.rows, feed.length), dtype=torch.bool)
    made[row] = outputs
    return made


def _cuts(own: Tensor) -> Iterator[int]:
    """Positions such that between each flagged output and its later input there is one."""
    last = -1
    for source in range(own.shape[1]):
        outputs = own[:source, source].nonzero()
        if outputs.shape[0] and last < int(outputs[-1]):
            last = source - 1
            yield last


def probe(search: Search, places: list[Place], seconds: float, plateaus: bool) -> Probed:
    """Try each place with weights and tokens of many kinds, until its kind has a case or time is up.

    ``seconds`` bound it, but two of them are always allowed.
    """
    end = time.monotonic() + max(seconds, LEAST_SECONDS)
    done = Probed(places)
    for number, (weights, base) in enumerate(_settings(search, plateaus)):
        first: Ran | None = None
        feed: Feed | None = None
        if len(places) > _MANY and not any(p.untried() for p in places):
            break
        for k, place in enumerate(places):
            if place.kind in search.found.leaks:
                continue
            if time.monotonic() > end:
                return done
            if place.feed is not feed:
                feed = place.feed
                search.subject.draw(*weights)
                values = base_values(feed, base, search.vocabulary, 900 + number)
                first = _run(search, feed, values)
            if first is None:
                continue
            try:
                tried = search.pair(feed, weights, values, place.edit, first, 7919 * number + k)
            except Exception:  # a change that the model refuses shows nothing
                continue
            place.runs += 1
            numbers = torch.ones_like(place.outputs)
            for one in tried:
                if one.shape[0] == numbers.shape[0]:
                    numbers[:, : one.shape[1]] &= one
            place.agreed += numbers if tried else torch.zeros_like(numbers)
    return done


def _run(search: Search, feed: Feed, values: list[Tensor]) -> Ran | None:
    try:
        ran = search.subject.run(feed, values)
    except Exception:  # a batch that the model refuses shows nothing
        return None
    search.found.note(feed, ran)
    return ran


def _settings(search: Search, plateaus: bool) -> Iterator[Setting]:
    """Weights and batches: moderate ones first, of which a saturated softmax or exponential hides nothing."""
    floats = any(leaf.value.is_floating_point() for leaf in search.feeds[0].leaves)
    random, few = Base("random"), Base("few")
    own = bool(search.subject.own)
    yield (0.0, 1.0, 0), random
    yield (1.0, 1.0, 1) if own else (0.0, 1.0, 1), random
    yield (1.0, 1.0, 11) if own else (0.0, 1.0, 11), random if floats else few
    yield (1.0, 1.0, 21) if own else (0.0, 1.0, 21), Base("small") if floats else random
    for k, number in enumerate(search.numbers[:4]):  # what is hidden by tokens that the model looks for
        yield (0.0, 1.0, 51 + k), Base("begin", number)
        yield (0.0, 1.0, 61 + k), Base("number", number)
    if own and sum(w.numel() for w in search.subject.own) <= MANY_WEIGHTS:
        yield (1.0, 4.0, 2), random
        yield (0.5, 12.0, 3), random
        if plateaus:
            yield (1.0, 100.0, 4), random
            yield (1.0, 100.0, 14), few
            yield (1.0, 1e4, 24), random
    yield (0.0, 1.0, 31), Base("large") if floats else Base("given")
    if floats and plateaus:
        yield (0.0, 1.0, 41), Base("large", 1000)


def everywhere(search: Search, feed: Feed, seconds: float) -> bool:
    """Change a batch at every cut, and each row of it. Whether all were tried before time was up."""
    end = time.monotonic() + max(seconds, LEAST_SECONDS)
    weights = (1.0, 1.0, 1) if search.subject.own else (0.0, 1.0, 1)
    edits: list[Edit] = []
    if feed.batch_dim is not None and feed.rows > 1:
        edits += [Edit(row, tuple(range(feed.length)), "random") for row in range(feed.rows)]
    cuts = _spread_out(range(feed.length - 1))
    edits += [Edit(k % feed.rows, tuple(range(cut + 1, feed.length)), "random") for k, cut in enumerate(cuts)]
    if feed.segments is not None:
        for row in range(feed.rows):
            for one in distinct(feed.segments[row]).tolist():
                inside = tuple((feed.segments[row] == one).nonzero()[:, 0].tolist())
                edits.append(Edit(row, inside, "random"))
    search.subject.draw(*weights)
    values = base_values(feed, Base("random"), search.vocabulary, 5)
    first = _run(search, feed, values)
    if first is None:
        return False
    for k, edit in enumerate(edits):
        if time.monotonic() > end:
            return False
        try:
            search.pair(feed, weights, values, edit, first, k)
        except Exception:  # a change that the model refuses shows nothing
            return False
    return True


def _spread_out(cuts: Sequence[int]) -> list[int]:
    """The same, the middle first, then those of both halves, and so on."""
    made: list[int] = []
    waiting = [(0, len(cuts))]
    for low, high in waiting:
        if low < high:
            middle = (low + high) // 2
            made.append(cuts[middle])
            waiting += [(low, middle), (middle + 1, high)]
    return made
