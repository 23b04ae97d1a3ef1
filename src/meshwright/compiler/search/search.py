"""The search: price the most promising candidates first, and keep the simplest of those that are nearly the fastest.

Candidates that cannot fit or cannot be fast enough by :mod:`bounds` are dropped. Of every argument (plain data
parallelism, full sharding, copies across nodes, tensor parallelism) the most promising one is priced, so that the
choice can be told; then whatever the corrected estimates rank first, until nothing can be expected of the rest. What
saves more memory than a plan that fits, at the cost of time, is not looked at, nor what saves less than one that does
not fit.
Recomputation is chosen against the memory of the simulated step: the least that fits.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from meshwright.compiler.cluster.cluster import Cluster
from meshwright.compiler.diagnostics import MeshwrightError
from meshwright.compiler.search.bounds import least_bytes, least_seconds
from meshwright.compiler.search.candidate import REPLICA, TENSOR, Candidate
from meshwright.compiler.search.candidates import candidates, microbatch_counts, variants
from meshwright.compiler.search.check import check_limits
from meshwright.compiler.search.estimate import Estimator
from meshwright.compiler.search.facts import ProgramFacts
from meshwright.compiler.search.limits import Limits
from meshwright.compiler.search.prices import Priced, Prices

FAMILY = 100
"""Candidates of one family that are kept in sight."""
LIKELY = 1.5
"""An estimate of more than so many times the memory is believed before anything has been priced."""
WORTH = 0.01
"""The share of a step for which recomputation is taken back block by block."""
SPARSE = 8
"""Recomputation in fewer than every so many blocks is not looked for."""
PATIENCE, GAIN = 4, 0.005
"""So many candidates in a row may fail to be faster by this share before the search ends."""
RIVAL = 1.15
"""The best of another argument is looked at closely if it takes no more than so many times the best time."""
TIGHT = 0.98
"""A plan that needs more than this share of the memory is chosen only if no other is as fast."""
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
            try:
                found = Priced(candidate, self.prices.price(candidate))
                self.estimate.learn(candidate, found.prediction)
                self.priced.append(found)
                self._done[candidate] = found
            except MeshwrightError as fault:
                self.refused.append((candidate, fault))
                self._done[candidate] = None
        return self._done[candidate]

    @property
    def left(self) -> int:
        """How many more candidates may be priced."""
        return self.limits.budget - len(self._done)


def search(facts: ProgramFacts, cluster: Cluster, ranks: int, limits: Limits, prices: Prices) -> Search:
    """Search. Raises MeshwrightError for limits that no plan can keep to; nothing that fits is no error here."""
    check_limits(facts, cluster, ranks, limits)
    found = Search(facts, cluster, ranks, limits, prices)
    for last_resort in (False, True):
        pool = _bounded(found, candidates(facts, cluster, ranks, limits.pins, last_resort=last_resort))
        if pool:
            _explore(found, pool)
            _exploit(found, pool)
        if found.fitting():
            break
    _refine(found)
    found.best = choose(found)
    return found


def choose(found: Search) -> Priced | None:
    """The simplest of those that are nearly the fastest; rather one that leaves some memory."""
    fitting = found.fitting()
    if not fitting:
        return None
    most = fitting[0].seconds * (1 + found.limits.within)
    near = [p for p in fitting if p.seconds <= most]
    return min(near, key=lambda p: (p.memory > TIGHT * found.capacity, p.candidate.simplicity(), p.seconds))


def rank(plans: Iterable[Candidate], prices: Prices, capacity: int) -> list[Priced]:
    """The given plans, the best first: those that fit by time, then the others by memory. For choosing among plans
    that somebody has measured."""
    priced = [Priced(one, prices.price(one)) for one in plans]
    return sorted(priced, key=lambda p: (p.memory > capacity, p.memory if p.memory > capacity else p.seconds))


def family(candidate: Candidate) -> tuple[object, ...]:
    """Candidates of one family are one argument: sharded how, copied across what, tensor parallelism or not."""
    hybrid = candidate.storage > 0 and candidate.size(REPLICA) > 1
    return (candidate.storage, hybrid, candidate.size(TENSOR) > 1)


def _bounded(found: Search, all_of_them: Iterable[Candidate]) -> list[Candidate]:
    """Those whose model state fits (all if there are none, so that it can be told what is missing), and of these the
    most promising of each family."""
    legal = list(dict.fromkeys(all_of_them))
    room = found.capacity - found.cluster.device.efficiency.reserve
    kept = [one for one in legal if least_bytes(one, found.facts) <= room]
    found.considered += len(legal)
    found.too_large += len(legal) - len(kept)
    if not kept:
        return sorted(legal, key=lambda one: found.estimate(one).memory)[:4]
    families: dict[tuple[object, ...], list[tuple[tuple[bool, float], Candidate]]] = {}
    for one in kept:
        guess = found.estimate(one)
        families.setdefault(family(one), []).append(((guess.memory > LIKELY * found.capacity, guess.seconds), one))
    return [one for members in families.values() for _, one in sorted(members, key=lambda m: m[0])[:FAMILY]]


def _explore(found: Search, pool: Sequence[Candidate]) -> None:
    """Price the most promising one of each argument; where it turns out not to fit, the next."""
    arguments: dict[object, list[Candidate]] = {}
    for one in sorted(pool, key=lambda one: one.simplicity()):
        arguments.setdefault(_argument(one), []).append(one)
    for key, members in arguments.items():
        if key == "other":
            continue
        for _ in range(3):
            likely = _promising(found, members) if found.left > found.limits.budget // 3 else None
            if likely is None:
                break
            priced = found.price(likely)
            if priced is not None and found.fits(priced):
                break


def _argument(one: Candidate) -> str:
    """Which step of the reasons a candidate speaks for."""
    if one.size(TENSOR) > 1:
        return "tensor"
    if one.storage == 0:
        return "plain"
    if one.size(REPLICA) > 1:
        return "copies"
    return "full" if one.storage == 3 else "other"


def _exploit(found: Search, pool: Sequence[Candidate]) -> None:
    """Price what the estimates rank first, as long as one may beat the best or be simpler at nearly its time."""
    vain = 0
    while found.left > found.limits.budget // 5 and vain < PATIENCE:  # the rest is for the refinement
        best = min((p.seconds for p in found.fitting()), default=None)
        one = _promising(found, pool, best)
        if one is None:
            return
        priced = found.price(one)
        better = priced is not None and found.fits(priced) and (best is None or priced.seconds < best * (1 - GAIN))
        vain = 0 if better or best is None else vain + 1


def _promising(found: Search, pool: Sequence[Candidate], best: float | None = None) -> Candidate | None:
    """The unpriced candidate with the least estimated time among those that are estimated to fit, or the one with the
    least memory if none is. None if nothing can be expected of any."""
    device, within = found.cluster.device, found.limits.within
    rest = [one for one in pool if one not in found._done and not _settled(found, one)]
    if best is not None:
        rest = [one for one in rest if least_seconds(one, found.facts, device) <= best]
    guesses = [(found.estimate(one), one) for one in rest]
    likely = [(g.seconds, one) for g, one in guesses if g.memory <= found.capacity * 1.02]
    if likely:
        seconds, one = min(likely, key=lambda pair: (pair[0], pair[1].simplicity()))
        return one if best is None or seconds <= best * max(HOPE, 1 + within) else None
    if best is None and guesses:
        return min(guesses, key=lambda pair: (pair[0].memory, pair[0].seconds))[1]
    return None


def _settled(found: Search, one: Candidate) -> bool:
    """Whether a priced plan of the same shape fits with less that saves memory, or does not fit with more."""
    for priced in found.priced:
        other = priced.candidate
        if (other.axes, other.storage, other.prefetch, other.offload) != (
            one.axes, one.storage, one.prefetch, one.offload
        ):  # fmt: skip
            continue
        less, more = _saving(other), _saving(one)
        if found.fits(priced) and all(a <= b for a, b in zip(less, more, strict=True)):
            return True
        if not found.fits(priced) and all(a >= b for a, b in zip(less, more, strict=True)):
            return True
    return False


def _saving(one: Candidate) -> tuple[float, ...]:
    """How much a candidate does to save memory: in microbatches, in recomputing cheap ops and dear ones."""
    share = 1 / one.every
    return one.microbatches, share if one.save != "all" else 0.0, share if one.save == "nothing" else 0.0


def _refine(found: Search) -> None:
    """Around the best: other variants, offload instead of recomputation, and recomputation in no more blocks than the
    memory asks for. So too around the best of every other argument that is not far behind: it is what the best is
    compared with."""
    best = choose(found)
    if best is None:
        return
    for variant in variants(best.candidate, found.facts, found.limits.pins):
        found.price(variant)
    fastest: dict[str, Priced] = {}
    for one in found.fitting():
        fastest.setdefault(_argument(one.candidate), one)
    for one in fastest.values():
        if one.seconds <= found.fitting()[0].seconds * RIVAL:
            _fewer_microbatches(found, one)
            _less_recomputation(found, one)
    _offloaded(found, found.fitting()[0])
    _less_recomputation(found, found.fitting()[0])


def _fewer_microbatches(found: Search, one: Priced) -> None:
    """The next smaller number of microbatches, where the memory may be enough."""
    candidate = one.candidate
    counts = microbatch_counts(found.facts.batch, candidate.batch_ranks)
    fewer = [count for count in counts if count < candidate.microbatches]
    lesser = replace(candidate, microbatches=max(fewer, default=candidate.microbatches))
    if found.left > 0 and found.limits.pins.allow(lesser) and found.estimate(lesser).memory <= HOPE * found.capacity:
        found.price(lesser)


def _offloaded(found: Search, one: Priced) -> None:
    """Optimizer state on the host, instead of recomputing so much."""
    candidate = one.candidate
    if not found.facts.state or candidate.offload:
        return
    lighter = ["all", "matmuls", "nothing"][: ["all", "matmuls", "nothing"].index(candidate.save)]
    for save in reversed(lighter):
        other = replace(candidate, offload=True, save=save, every=1)  # type: ignore[arg-type]  # one of Save
        if found.left <= 0 or not found.limits.pins.allow(other):
            return
        priced = found.price(other)
        if priced is None or not found.fits(priced):
            return


def _less_recomputation(found: Search, one: Priced) -> None:
    """The largest ``every`` with which the candidate still fits, by bisection on the simulated memory; as long as the
    recomputation that may be saved is worth it."""
    candidate, pins = one.candidate, found.limits.pins
    if candidate.save == "all" or pins.every is not None or found.facts.depth < 4:
        return
    tried = [p for p in found.priced if replace(p.candidate, every=1) == replace(candidate, every=1)]
    low = max(p.candidate.every for p in tried if found.fits(p))
    # from high on it does not fit, or is not looked at
    most = min(max(found.facts.blocks.values()), SPARSE)
    high = min([p.candidate.every for p in tried if not found.fits(p)], default=most + 1)
    again = one.prediction.compute.get("recomputed", 0.0) * candidate.every / one.seconds
    while high - low > 1 and again * (1 / low - 1 / high) > WORTH and found.left > 0:
        middle = min(max(_wanted(found, candidate), low + 1), high - 1)
        priced = found.price(replace(candidate, every=middle))
        if priced is not None and found.fits(priced):
            low = middle
        else:
            high = middle


def _wanted(found: Search, candidate: Candidate) -> int:
    """The ``every`` at which the memory meets the capacity: it is linear in the share of blocks that recompute."""
    points: dict[float, int] = {}
    for priced in found.priced:
        other = priced.candidate
        alike = replace(other, every=1, save=candidate.save) == replace(candidate, every=1)
        if alike and other.save in ("all", candidate.save):
            points[1 / other.every if other.save != "all" else 0.0] = priced.memory
    near = sorted(points, key=lambda share: abs(points[share] - found.capacity))[:2]
    if len(near) < 2 or points[near[0]] == points[near[1]]:
        return 2 * candidate.every
    slope = (points[near[1]] - points[near[0]]) / (near[1] - near[0])
    share = near[0] + (found.capacity - points[near[0]]) / slope
    return int(1 / share) if share > 0 else SPARSE
