"""Nothing fits: which limit, by how much, where, and the smallest change that makes it fit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from meshwright.compiler.cluster.cluster import Cluster
from meshwright.compiler.diagnostics import MeshwrightError, error
from meshwright.compiler.search.bounds import least_memory
from meshwright.compiler.search.candidate import Candidate
from meshwright.compiler.search.candidates import candidates
from meshwright.compiler.search.limits import Limits
from meshwright.compiler.search.prices import Priced, Prices
from meshwright.compiler.search.search import search
from meshwright.compiler.search.state import Search
from meshwright.compiler.search.telling import described, memory

GROWTH = (2, 4, 8, 16, 32)
"""By how much the cluster is made larger to see whether that is enough."""


def infeasible(found: Search) -> MeshwrightError:
    """The error of a search without a plan: E0440 where memory is short, E0439 where nothing could be compiled."""
    limits = found.limits
    if not found.priced:
        return _nothing(found)
    nearest = min(found.priced, key=lambda p: p.memory)
    moment, kinds = nearest.prediction.memory.at, nearest.prediction.memory.by_kind
    largest = ", ".join(
        f"{memory(size)} {kind}" for kind, size in sorted(kinds.items(), key=lambda k: -k[1])[:4] if size
    )
    where = f"{moment.graph}, {moment.phase}" + (f" of {moment.block}" if moment.block else "")
    pinned = f" under the pins '{limits.pins.text}'" if limits.pins.text else ""
    return error(
        "E0440",
        f"no plan for {found.ranks} ranks fits into {memory(found.capacity)} of memory{pinned}: the one that needs "
        f"least lacks {memory(nearest.memory - found.capacity)}",
        action=_change(found, nearest),
        notes=(
            f"that is {described(nearest.candidate)} ({nearest.candidate}), which needs {memory(nearest.memory)}",
            f"its peak is in {where}: {largest}",
            "the model state alone is too large in every legal plan"
            if found.too_large == found.considered
            else f"of {found.considered} legal plans, the model state alone is too large in {found.too_large}",
        ),
    )


def _nothing(found: Search) -> MeshwrightError:
    pins = found.limits.pins
    if found.refused:
        one, fault = found.refused[0]
        notes = (f"{one}: {fault.diagnostics[0].message}", f"{len(found.refused)} plans were tried")
        return error(
            "E0439", "no plan can be compiled for this program", action=fault.diagnostics[0].action, notes=notes
        )
    words = f" that keeps to the pins '{pins.text}'" if pins.text else ""
    return error(
        "E0439",
        f"there is no plan for {found.ranks} ranks{words}",
        action="drop a pin" if pins.text else "change the batch or the number of ranks",
    )


def _change(found: Search, nearest: Priced) -> str:
    """The smallest change that was found to be enough, tried in the order of what it costs."""
    limits = found.limits
    missing = nearest.memory - found.capacity
    if limits.reserve >= missing > 0:
        return f"reserve at most {memory(limits.reserve - missing)}"
    if limits.pins.text:
        free = search(found.facts, found.cluster, found.ranks, Limits(limits.reserve, budget=8), found.prices)
        if free.best is not None:
            return f"drop the pins: {free.best.candidate} fits with {memory(free.best.memory)}"
    for ranks, cluster in _larger(found.cluster, found.ranks):
        one = _fitting(found, ranks, cluster)
        if one is not None:
            return f"plan for {ranks} ranks: {one.candidate} fits with {memory(one.memory)}"
    if missing < found.facts.model_state:
        return f"use devices with {memory(nearest.memory + limits.reserve)} of memory, or a smaller model"
    return "use a smaller model, or shorter samples"


def _larger(cluster: Cluster, ranks: int) -> Iterator[tuple[int, Cluster]]:
    """More of the same: all devices of the cluster if the plan was for some of them, then larger clusters."""
    if ranks < cluster.ranks:
        yield cluster.ranks, cluster
    if cluster.network is not None:
        return
    for factor in GROWTH:
        last = cluster.tiers[-1]
        tier = replace(last, size=last.size * factor)
        yield cluster.ranks * factor, replace(cluster, tiers=(*cluster.tiers[:-1], tier), mixed=())


def _fitting(found: Search, ranks: int, cluster: Cluster) -> Priced | None:
    """A plan for so many ranks that fits, if the most frugal ones do."""
    legal = candidates(found.facts, cluster, ranks, found.limits.pins, last_resort=True)
    room = found.capacity - cluster.device.efficiency.reserve
    held = [(c, _held(c, found)) for c in legal if c.batch_ranks <= found.facts.batch]
    frugal = sorted((c for c, size in held if size <= room), key=lambda c: found.estimate(c).memory)
    usual = [c for c in frugal if not c.offload] or frugal
    for one in usual[:1]:
        priced = _price(found.prices, one, cluster)
        if priced is not None and priced.memory <= found.capacity:
            return priced
    return None


def _held(one: Candidate, found: Search) -> int:
    return sum(least_memory(one, found.facts).values())


def _price(prices: Prices, one: Candidate, cluster: Cluster) -> Priced | None:
    try:
        return Priced(one, prices.price(one, cluster))
    except MeshwrightError:
        return None
