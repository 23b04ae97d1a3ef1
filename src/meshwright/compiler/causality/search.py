"""Looks for a pair of batches that shows a leak: the same but for tokens that some output must not see."""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from meshwright.compiler.causality.comparing import distances, first_far, protected
from meshwright.compiler.causality.edits import Base, Edit, base_values, bases, edited, edits, row_of
from meshwright.compiler.causality.feed import Feed, Role
from meshwright.compiler.causality.running import Ran, Subject

LEAK_ABOVE = 1e-9
"""In float64, of the largest element of the output."""

ROUNDING_BELOW = 1e-12

MANY_WEIGHTS = 20_000_000
"""Elements beyond which weights are drawn anew in one way alone."""

LEAST = 8
"""Pairs of runs that are compared, however slow the model."""

_NARROW_LEAK_ABOVE = 1e-4
"""For what cannot be run in float64."""


@dataclass(frozen=True)
class Case:
    """Two runs that differ where they must not."""

    kind: str
    feed: Feed
    values_a: list[Tensor]
    values_b: list[Tensor]
    edit: Edit
    output: tuple[int, int]
    which: int
    difference: float
    weights: tuple[float, float, int]


@dataclass
class Found:
    """What the search came to know."""

    leaks: dict[str, Case] = field(default_factory=dict)
    rounding: dict[str, float] = field(default_factory=dict)
    tests: int = 0
    other_path: bool = False
    """Whether two runs of a pair read different values off their tensors, and agreed nevertheless."""
    failed: str = ""


@dataclass(frozen=True)
class Effort:
    """How long to look."""

    pairs: int
    seconds: float
    strong_weights: bool = True


@dataclass
class Search:
    """A search over weights, batches and changes."""

    subject: Subject
    feeds: list[Feed]
    vocabulary: dict[int, int]
    numbers: list[int]
    seen: frozenset[str]
    """Kinds that the analysis flags without a choice in between: of these small differences count as well."""
    found: Found = field(default_factory=Found)

    def look(self, wanted: frozenset[str], effort: Effort) -> None:
        """Until each wanted kind has a case, or the effort is spent; what else is met is kept as well."""
        end = time.monotonic() + effort.seconds
        spent = self.found.tests + effort.pairs
        dice = random.Random(0)
        for number, (feed, weights, base) in enumerate(self._settings(effort)):
            self.subject.draw(*weights)
            values = base_values(feed, base, self.vocabulary, number)
            with contextlib.suppress(Exception):  # a batch that the model refuses shows nothing
                first = self.subject.run(feed, values)
                self._edits(feed, weights, values, first, number, dice, wanted, end, spent)
            if (wanted and wanted <= self.found.leaks.keys()) or time.monotonic() > end or self.found.tests >= spent:
                break

    def _edits(
        self,
        feed: Feed,
        weights: tuple[float, float, int],
        values: list[Tensor],
        first: Ran,
        number: int,
        dice: random.Random,
        wanted: frozenset[str],
        end: float,
        spent: int,
    ) -> None:
        for k, edit in enumerate(edits(feed, self.numbers, dice)):
            late = time.monotonic() > end and self.found.tests >= LEAST
            if k >= (24 if number < 4 else 10) or late or self.found.tests >= spent:
                return
            changed = edited(feed, values, edit, self.vocabulary, 1000 * number + k)
            second = self.subject.run(feed, changed)
            self.found.tests += 1
            self._compare(feed, weights, values, changed, edit, first, second)
            if wanted and wanted <= self.found.leaks.keys():
                return

    def _settings(self, effort: Effort) -> Iterator[tuple[Feed, tuple[float, float, int], Base]]:
        integers = any(not leaf.value.is_floating_point() for leaf in self.feeds[0].leaves)
        kinds = bases(self.numbers, integers)
        weights: list[tuple[float, float, int]] = [(0.0, 1.0, 0)]
        if self.subject.own:
            weights += [(1.0, 1.0, 1)]
            large = sum(w.numel() for w in self.subject.own) > MANY_WEIGHTS
            if effort.strong_weights and not large:
                weights += [(1.0, 4.0, 2), (0.5, 12.0, 3)]
        ends = self.feeds[:1] + self.feeds[1:][-1:]
        for seed in range(50):
            for base in kinds:
                for one in weights:
                    for feed in self.feeds if seed else ends:
                        yield feed, (one[0], one[1], one[2] + 10 * seed), base

    def _compare(
        self,
        feed: Feed,
        weights: tuple[float, float, int],
        values: list[Tensor],
        changed: list[Tensor],
        edit: Edit,
        first: Ran,
        second: Ran,
    ) -> None:
        clean = True
        for which, (a, b, offset) in enumerate(zip(first.outputs, second.outputs, first.offsets, strict=False)):
            if a.shape != b.shape:
                continue
            far = distances(a, b)
            if far is None:
                clean = False
                continue
            for kind, allowed in protected(feed, edit, far.shape[1], offset).items():
                worst = torch.where(allowed, far, 0.0)
                most = float(worst.max()) if worst.numel() else 0.0
                if most == 0:
                    continue
                clean = False
                place = first_far(worst)
                case = Case(kind, feed, values, changed, edit, (place[0], place[1] - offset), which, most, weights)
                self._keep(case)
        if clean and first.read != second.read:
            self.found.other_path = True

    def _keep(self, case: Case) -> None:
        if case.kind in self.found.leaks:
            return
        bound = LEAK_ABOVE if self.subject.wide else _NARROW_LEAK_ABOVE
        if case.difference > bound:
            leak = case.difference > 1e-6 or not self.subject.wide or not self._grows(case)
        elif case.difference > ROUNDING_BELOW and self.subject.wide and case.kind in self.seen:
            leak = not self._grows(case)
        else:
            leak = False
        if leak:
            self.found.leaks[case.kind] = case
        else:
            known = self.found.rounding.get(case.kind, 0.0)
            self.found.rounding[case.kind] = max(known, case.difference)

    def _grows(self, case: Case) -> bool:
        """Whether the difference is much larger in the model's own precision: it is rounding then."""
        self.subject.wide = False
        try:
            a, b = self.subject.run(case.feed, case.values_a), self.subject.run(case.feed, case.values_b)
        except Exception:  # it runs in float64 alone; then size decides
            return case.difference < LEAK_ABOVE
        finally:
            self.subject.wide = True
        far = distances(a.outputs[case.which], b.outputs[case.which])
        if far is None:
            return False
        allowed = protected(case.feed, case.edit, far.shape[1], a.offsets[case.which])[case.kind]
        return float(torch.where(allowed, far, 0.0).max()) > 1e3 * case.difference

    def smallest(self, case: Case) -> Case:
        """The same leak by a change of one token, if there is such a one."""
        self.subject.draw(*case.weights)
        own = (0.0, 1.0, 0)
        if case.weights != own and (same := self._again(replace(case, weights=own))) is not None:
            case = same
        places = [p for p in case.edit.positions if _forbidden(case, p)]
        for place in sorted(places)[:16] if len(places) > 1 else []:
            edit = replace(case.edit, positions=(place,))
            values = _only(case, place)
            made = self._again(replace(case, edit=edit, values_b=values))
            if made is not None:
                return made
        return case

    def _again(self, case: Case) -> Case | None:
        if self.subject.clock.late:
            return None
        self.subject.draw(*case.weights)
        try:
            a, b = self.subject.run(case.feed, case.values_a), self.subject.run(case.feed, case.values_b)
        except Exception:  # whatever the user's model raises with these weights
            return None
        far = distances(a.outputs[case.which], b.outputs[case.which])
        if far is None:
            return None
        offset = a.offsets[case.which]
        allowed = protected(case.feed, case.edit, far.shape[1], offset)[case.kind]
        worst = torch.where(allowed, far, 0.0)
        most = float(worst.max())
        if most <= (1e-7 if self.subject.wide else _NARROW_LEAK_ABOVE):
            return None
        place = first_far(worst)
        return replace(case, output=(place[0], place[1] - offset), difference=most)


def _forbidden(case: Case, place: int) -> bool:
    if case.kind == "batch":
        return True
    row, time_at = case.output
    if case.kind == "future":
        return place > time_at
    assert case.feed.segments is not None
    return bool(case.feed.segments[row, place] != case.feed.segments[row, time_at])


def _only(case: Case, place: int) -> list[Tensor]:
    made = []
    for leaf, a, b in zip(case.feed.leaves, case.values_a, case.values_b, strict=True):
        if leaf.role is Role.TOKENS:
            value = a.clone()
            row_of(value, case.feed, case.edit.row)[place] = row_of(b, case.feed, case.edit.row)[place]
            made.append(value)
        else:
            made.append(a)
    return made
