"""Around the best: variants, and no more recomputation, microbatches or waiting than the memory asks for."""

from __future__ import annotations

from dataclasses import replace

from meshwright.compiler.search.candidate import Candidate
from meshwright.compiler.search.candidates import microbatch_counts, variants
from meshwright.compiler.search.prices import Priced
from meshwright.compiler.search.state import HOPE, RIVAL, Search, argument, choose

WORTH = 0.01
"""The share of a step for which recomputation is taken back block by block."""
SPARSE = 8
"""Recomputation in fewer than every so many blocks is not looked for."""
SEARCHABLE = 1500
"""A schedule of more actions is not searched for."""


def refine(found: Search) -> None:
    """Around the best: other variants, offload instead of recomputation, and recomputation in no more blocks than the
    memory asks for. So too around the best of every other argument that is not far behind: it is what the best is
    compared with."""
    best = choose(found)
    if best is None:
        return
    for variant in variants(best.candidate, found.facts, found.limits.pins):
        # a pipeline is dear to price, under all its schedules
        hopeful = variant.pipe == 1 or found.estimate(variant).seconds <= HOPE * best.seconds
        if found.left > 0 and hopeful:
            found.price(variant)
    fastest: dict[str, Priced] = {}
    for one in found.fitting():
        fastest.setdefault(argument(one.candidate), one)
    for one in fastest.values():
        if one.seconds <= found.fitting()[0].seconds * RIVAL:
            _fewer_microbatches(found, one)
            _less_recomputation(found, one)
    _offloaded(found, found.fitting()[0])
    _less_recomputation(found, found.fitting()[0])
    _pipeline(found)


def _pipeline(found: Search) -> None:
    """Around the best pipeline, if it may be chosen: recomputation by stage, and a schedule for its own costs."""
    fitting = found.fitting()
    one = next((p for p in fitting if p.candidate.pipe > 1), None)
    pins = found.limits.pins
    if one is None or one.seconds > fitting[0].seconds * (1 + found.limits.within):
        return
    if one.candidate.save != "all" and found.left > 0:
        other = replace(one.candidate, by_stage=True, every=1)
        if pins.allow(other):
            priced = found.price(other)
            one = priced if priced is not None and found.fits(priced) and priced.seconds < one.seconds else one
    searched = replace(one.candidate, schedule="list")
    actions = 3 * searched.pipe * searched.virtual * searched.microbatches
    if pins.schedule is None and actions <= SEARCHABLE and not found.facts.meets:
        found.price(searched)


def _fewer_microbatches(found: Search, one: Priced) -> None:
    """The next smaller number of microbatches, where the memory may be enough."""
    candidate = one.candidate
    counts = microbatch_counts(found.facts.batch, candidate.batch_ranks)
    fewer = [count for count in counts if count < candidate.microbatches]
    lesser = replace(candidate, microbatches=max(fewer, default=candidate.microbatches))
    if lesser.microbatches < lesser.pipe:
        return
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
    if candidate.save == "all" or candidate.by_stage or pins.every is not None or found.facts.depth < 4:
        return
    if candidate.pipe > 1 and pins.allow(replace(candidate, by_stage=True, every=1)):
        return  # stages choose for themselves
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
