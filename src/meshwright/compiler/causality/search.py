"""Looks for a pair of batches that shows a leak: the same but for tokens that some output must not see."""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from meshwright.compiler.causality.cases import Case, Effort, Found, worst_in
from meshwright.compiler.causality.comparing import Apart, distances, first_far, protected
from meshwright.compiler.causality.edits import Base, Edit, base_values, bases, edited, edits
from meshwright.compiler.causality.feed import Feed
from meshwright.compiler.causality.roundings import Roundings
from meshwright.compiler.causality.running import Ran, Subject

LEAK_ABOVE = 1e-9
"""In float64, of the largest element of the output."""

ROUNDING_BELOW = 3e-14

MANY_WEIGHTS = 20_000_000
"""Elements beyond which weights are drawn anew in one way alone."""

LEAST = 8
"""Pairs of runs that are compared, however slow the model."""


@dataclass
class Search:
    """A search over weights, batches and changes."""

    subject: Subject
    feeds: list[Feed]
    vocabulary: dict[int, int]
    numbers: list[int]
    seen: frozenset[str]
    """Kinds that the analysis flags without a choice in between: of these small differences count as well."""
    keen: frozenset[str] = frozenset()
    """Of those, kinds of which runs in the model's own precision alone can tell: there any difference counts."""
    narrow_bound: float = 1e-4
    """Above it a difference is a leak where runs are not in float64."""
    calls: int = 0
    """How many calls were made before each run."""
    found: Found = field(default_factory=Found)
    wide: bool = field(init=False)
    """Whether the model can be run in float64."""

    def __post_init__(self) -> None:
        self.wide = self.subject.wide

    def look(self, wanted: frozenset[str], effort: Effort) -> None:
        """Until each wanted kind has a case, or the effort is spent; what else is met is kept as well."""
        end = time.monotonic() + effort.seconds
        spent = self.found.runs + effort.pairs
        dice = random.Random(0)
        for number, (feed, weights, base) in enumerate(self._settings(effort)):
            self.subject.draw(*weights)
            values = base_values(feed, base, self.vocabulary, number)
            with contextlib.suppress(Exception):  # a batch that the model refuses shows nothing
                first = self.subject.run(feed, values)
                self.found.note(feed, first)
                self._edits(feed, weights, values, first, number, dice, wanted, end, spent)
            if (wanted and wanted <= self.found.leaks.keys()) or time.monotonic() > end or self.found.runs >= spent:
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
            late = time.monotonic() > end and self.found.runs >= LEAST
            if k >= (24 if number < 4 else 10) or late or self.found.runs >= spent:
                return
            self.pair(feed, weights, values, edit, first, 1000 * number + k)
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

    def pair(
        self, feed: Feed, weights: tuple[float, float, int], values: list[Tensor], edit: Edit, first: Ran, seed: int
    ) -> list[Tensor]:
        """Run with a change, and compare with the run without. Returns for each output where numbers were compared.

        These are of the positions of the input. Raises what the model raises.
        """
        changed = edited(feed, values, edit, self.vocabulary, seed)
        self.found.runs += 1
        second = self.subject.run(feed, changed)
        self.found.note(feed, second)
        tried = []
        told = False
        for which, (a, b, offset) in enumerate(zip(first.outputs, second.outputs, first.offsets, strict=False)):
            if a.shape != b.shape:
                continue
            apart = distances(a, b)
            self._notice_numbers(which, apart)
            for kind, allowed in protected(feed, edit, apart.far.shape[1], offset).items():
                told = told or bool((allowed & apart.tried).any())
                worst = torch.where(allowed, apart.far, 0.0)
                most = float(worst.max()) if worst.numel() else 0.0
                if most > 0 and kind not in self.found.leaks:
                    place = first_far(worst)
                    output = (place[0], place[1] - offset)
                    case = Case(kind, feed, values, changed, edit, output, which, most, weights)
                    self._keep(replace(case, wide=self.subject.wide, state=self.subject.state, calls=self.calls))
            tried.append(apart.tried[:, offset : offset + feed.length])
        self.found.tests += told
        return tried

    def _notice_numbers(self, which: int, apart: Apart) -> None:
        self.found.finite = self.found.finite or bool(apart.features.any())
        known = self.found.features.get(which)
        if known is None or known.shape != apart.features.shape:
            self.found.features[which] = apart.features
        else:
            self.found.features[which] = known | apart.features

    def _keep(self, case: Case) -> None:
        narrow = not self.subject.wide
        if case.difference > (self.narrow_bound if narrow else LEAK_ABOVE):
            leak = case.difference > 1e-6 or narrow or not self._grows(case)
        elif narrow:
            leak = case.kind in self.keen
        elif case.difference > ROUNDING_BELOW and case.kind in self.seen:
            leak = not self._grows(case)
        else:
            leak = False
        noise = self._noise(case) if leak else 0.0
        if noise is None:
            self.found.unsteady = True
        elif leak and case.difference > 100 * noise:
            self.found.leaks[case.kind] = case
        else:
            known = self.found.rounding.get(case.kind, 0.0)
            self.found.rounding[case.kind] = max(known, case.difference)

    def _noise(self, case: Case) -> float | None:
        """How far the output is carried by a rounding of each weight; None if runs of the same tokens differ."""
        a, again = (self.subject.run(case.feed, case.values_a) for _ in range(2))
        if worst_in(case, a, again) > 1e-3 * case.difference:
            return None
        most = 0.0
        plainly = case.weights[:2] == (0.0, 1.0) and case.difference > 1e-6  # nothing of the search made it ill
        for pattern in range(1, 4) if self.subject.wide and not plainly else ():
            for values, plain in ((case.values_a, a), (case.values_b, None)):
                plain = plain or self.subject.run(case.feed, values)
                with self.subject.off_by_roundings(pattern), contextlib.suppress(Exception):
                    # of the user's model, which may refuse other weights
                    most = max(most, worst_in(case, plain, self.subject.run(case.feed, values, Roundings(pattern))))
                if case.difference <= 100 * most:
                    return most
        return most

    def _grows(self, case: Case) -> bool:
        """Whether the difference is much larger in the model's own precision: it is rounding then."""
        self.subject.wide = False
        try:
            a, b = self.subject.run(case.feed, case.values_a), self.subject.run(case.feed, case.values_b)
        except Exception:  # it runs in float64 alone; then size decides
            return case.difference < LEAK_ABOVE
        finally:
            self.subject.wide = True
        return worst_in(case, a, b) > 1e3 * case.difference
