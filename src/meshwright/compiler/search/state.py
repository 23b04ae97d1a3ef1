"""What a search has come to: what was priced, what fits, and what would be chosen of it."""

from __future__ import annotations

from dataclasses import dataclass, field

from meshwright.compiler.cluster.cluster import Cluster
from meshwright.compiler.diagnostics import MeshwrightError
from meshwright.compiler.search.candidate import REPLICA, TENSOR, Candidate
from meshwright.compiler.search.candidates import schedules, usual_schedule
from meshwright.compiler.search.estimate import Estimator
from meshwright.compiler.search.facts import ProgramFacts
from meshwright.compiler.search.limits import Limits
from meshwright.compiler.search.prices import Priced, Prices

TIGHT = 0.98
"""A plan that needs more than this share of the memory is chosen only if no other is as fast."""
RIVAL = 1.15
"""The best of another argument is looked at closely if it takes no more than so many times the best time."""
HOPE = 1.05
"""A candidate whose estimate is more than so many times the best time is not priced."""


@dataclass
class Search:
    """What has been looked at. ``best`` is None if nothing fits."""

    facts: ProgramFacts
    cluster: Cluster
    ranks: int
    limits: Limits
    prices: Prices
    priced: list[Priced] = field(default_factory=list)
    refused: list[tuple[Candidate, MeshwrightError]] = field(default_factory=list)
    considered: int = 0
    """Legal candidates, priced or not."""
    too_large: int = 0
    """Of these, the ones whose model state alone exceeds the memory."""
    best: Priced | None = None

    def __post_init__(self) -> None:
        self.estimate = Estimator(self.facts, self.cluster)
        self._done: dict[Candidate, Priced | None] = {}
        self._compiled: set[Candidate] = set()
        self._best_of: dict[object, tuple[str, int]] = {}
        """By twin of pipelines that were priced: the best schedule, and how many stages each rank has under it."""

    @property
    def capacity(self) -> int:
        """Bytes of a device that the plan may use."""
        return self.cluster.device.memory - self.limits.reserve

    def fits(self, one: Priced) -> bool:
        return one.memory <= self.capacity

    def fitting(self) -> list[Priced]:
        """Those that fit, the fastest first."""
        return sorted((p for p in self.priced if self.fits(p)), key=lambda p: p.seconds)

    def price(self, candidate: Candidate) -> Priced | None:
        """Price a candidate once; None if the program cannot be cut so."""
        if candidate not in self._done:
            self._compiled.add(candidate.inner)
            try:
                found = Priced(candidate, self.prices.price(candidate))
                self.estimate.learn(candidate, found.prediction)
                self.priced.append(found)
                self._done[candidate] = self._best_schedule(found) if candidate.pipe > 1 else found
            except MeshwrightError as fault:
                self.refused.append((candidate, fault))
                self._done[candidate] = None
        return self._done[candidate]

    def _best_schedule(self, usual: Priced) -> Priced:
        """The same pipeline under the schedule that is best for it, which takes no further program. Of the others
        nothing is kept."""
        if (
            usual.candidate.schedule not in (usual_schedule(self.facts, self.limits.pins), self.limits.pins.schedule)
            or usual.candidate.schedule == "list"
        ):
            return usual  # a variant of one whose schedule has been chosen
        least = usual.seconds - usual.prediction.other.get("bubble", 0.0)
        if any(p.seconds < least / (1 + self.limits.within) for p in self.fitting()):
            return usual  # not even without a bubble
        best, spent = usual, ""
        shallower: dict[str, Priced] = {}
        known = self._best_of.get(twin(usual.candidate))
        for one in schedules(usual.candidate, self.facts, self.limits.pins):
            if one in self._done or one.schedule == spent or (known and known != (one.schedule, one.virtual)):
                continue
            found = Priced(one, self.prices.price(one))
            before = shallower.setdefault(one.schedule, found)
            if before is not found and (found.seconds >= before.seconds or not self.fits(found)):
                spent = one.schedule  # with more stages on each rank it only gets worse
            shallower[one.schedule] = found
            best = min((best, found), key=lambda p: (not self.fits(p), p.seconds if self.fits(p) else p.memory))
            self._done[one] = found
        self.priced += [best] if best is not usual else []
        if self.fits(best):
            self._best_of.setdefault(twin(best.candidate), (best.candidate.schedule, best.candidate.virtual))
        return best

    @property
    def left(self) -> int:
        """How many more programs may be compiled."""
        return self.limits.budget - len(self._compiled)


def choose(found: Search) -> Priced | None:
    """The simplest of those that are nearly the fastest; rather one that leaves some memory."""
    fitting = found.fitting()
    if not fitting:
        return None
    most = fitting[0].seconds * (1 + found.limits.within)
    near = [p for p in fitting if p.seconds <= most]
    return min(near, key=lambda p: (p.memory > TIGHT * found.capacity, p.candidate.simplicity(), p.seconds))


def twin(one: Candidate) -> tuple[object, ...]:
    """What a pipeline has in common with those that differ only in what their data ranks hold and recompute."""
    return one.pipe, one.size(TENSOR), one.microbatches, one.sequence, one.prefetch, one.offload, one.whole


def family(candidate: Candidate) -> tuple[object, ...]:
    """Candidates of one family are one argument: sharded how, copied across what, tensor parallelism or not."""
    hybrid = candidate.storage > 0 and candidate.size(REPLICA) > 1
    return (candidate.storage, hybrid, candidate.size(TENSOR) > 1, candidate.pipe > 1)


def argument(one: Candidate) -> str:
    """Which step of the reasons a candidate speaks for."""
    if one.pipe > 1:
        return "pipe"
    if one.size(TENSOR) > 1:
        return "tensor"
    if one.storage == 0:
        return "plain"
    if one.size(REPLICA) > 1:
        return "copies"
    return "full" if one.storage == 3 else "other"
