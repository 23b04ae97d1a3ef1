"""The search: price the most promising candidates first, and keep the simplest of those that are nearly the fastest.

Candidates that cannot fit or cannot be fast enough by :mod:`bounds` are dropped. Of every argument (plain data
parallelism, full sharding, copies across nodes, tensor parallelism) the most promising one is priced, so that the
choice can be told; then whatever the corrected estimates rank first, until nothing can be expected of the rest. What
saves more memory than a plan that fits, at the cost of time, is not looked at, nor what saves less than one that does
not fit.
Recomputation is chosen against the memory of the simulated step: the least that fits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from meshwright.compiler.cluster.cluster import Cluster
from meshwright.compiler.search.bounds import least_bytes, least_seconds
from meshwright.compiler.search.candidate import Candidate
from meshwright.compiler.search.candidates import candidates
from meshwright.compiler.search.check import check_limits
from meshwright.compiler.search.facts import ProgramFacts
from meshwright.compiler.search.limits import Limits
from meshwright.compiler.search.prices import Priced, Prices
from meshwright.compiler.search.refine import refine
from meshwright.compiler.search.state import HOPE, RIVAL, Search, argument, choose, family, twin

FAMILY = 100
"""Candidates of one family that are kept in sight."""
LIKELY = 1.5
"""An estimate of more than so many times the memory is believed before anything has been priced."""
TWINS = 2
"""Of pipelines that differ only in what their data ranks hold and recompute, so many that fit are priced."""
PATIENCE, GAIN = 4, 0.005
"""So many candidates in a row may fail to be faster by this share before the search ends."""


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
    refine(found)
    found.best = choose(found)
    return found


def rank(plans: Iterable[Candidate], prices: Prices, capacity: int) -> list[Priced]:
    """The given plans, the best first: those that fit by time, then the others by memory. For choosing among plans
    that somebody has measured."""
    priced = [Priced(one, prices.price(one)) for one in plans]
    return sorted(priced, key=lambda p: (p.memory > capacity, p.memory if p.memory > capacity else p.seconds))


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
        arguments.setdefault(argument(one), []).append(one)
    for key, members in arguments.items():
        if key == "other":
            continue
        for _ in range(3):
            likely = _promising(found, members) if found.left > found.limits.budget // 3 else None
            if likely is None or (key == "pipe" and not _worth_a_pipeline(found, likely)):
                break
            priced = found.price(likely)
            if priced is not None and found.fits(priced):
                break


def _worth_a_pipeline(found: Search, one: Candidate) -> bool:
    """Whether a pipeline may be as fast as what is known, or nothing else fits."""
    fitting = found.fitting()
    return not fitting or found.estimate(one).seconds <= RIVAL * fitting[0].seconds


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
    axes = {(twin(p.candidate), p.candidate.axes) for p in found.priced if p.candidate.pipe > 1 and found.fits(p)}
    known = Counter(key for key, _ in axes)
    rest = [one for one in pool if one not in found._done and not _settled(found, one)]
    rest = [one for one in rest if one.pipe == 1 or known[twin(one)] < TWINS]
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
        ) or (one.pipe > 1 and other.microbatches != one.microbatches):  # fmt: skip
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
