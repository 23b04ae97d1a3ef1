"""What a little more of each resource would buy: the same programs, simulated on a changed cluster."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from meshwright.compiler.cluster.cluster import Cluster
from meshwright.compiler.search.prices import Priced
from meshwright.compiler.search.state import Search
from meshwright.compiler.search.telling import memory, percent

MORE = 0.1


def sensitivity(found: Search, best: Priced) -> list[str]:
    """One sentence on bandwidths and compute, one on memory."""
    gains = [(name, _gain(found, best, cluster)) for name, cluster in _stronger(found.cluster)]
    useful = [f"{name} {percent(gain)}" for name, gain in gains if gain >= 0.0005]
    nothing = [name for name, gain in gains if gain < 0.0005]
    text = f"{percent(MORE)} more would make the step faster by: {', '.join(useful)}" if useful else ""
    if nothing:
        text += (
            ("; " if text else f"{percent(MORE)} more of ")
            + f"{' and '.join(nothing)}"
            + (": nothing" if useful else " would buy nothing")
        )
    return [f"{text}." if text else "", _memory(found, best)]


def _gain(found: Search, best: Priced, cluster: Cluster) -> float:
    return 1 - found.prices.price(best.candidate, cluster).seconds / best.seconds


def _stronger(cluster: Cluster) -> Iterator[tuple[str, Cluster]]:
    """The cluster with more of one thing."""
    device = cluster.device
    rates = {dtype: rate * (1 + MORE) for dtype, rate in device.flops.items()}
    yield "compute", replace(cluster, device=replace(device, flops=rates))
    yield "memory bandwidth", replace(cluster, device=replace(device, bandwidth=device.bandwidth * (1 + MORE)))
    if cluster.network is not None:
        links = tuple(replace(link, bandwidth=link.bandwidth * (1 + MORE)) for link in cluster.network.links)
        yield "links between nodes", replace(cluster, network=replace(cluster.network, links=links))
        return
    for level, tier in enumerate(cluster.tiers):
        if tier.size > 1:
            faster = replace(tier, bandwidth=tier.bandwidth * (1 + MORE))
            yield tier.name, replace(cluster, tiers=(*cluster.tiers[:level], faster, *cluster.tiers[level + 1 :]))


def _memory(found: Search, best: Priced) -> str:
    """The fastest of what was priced that more memory would admit."""
    more = int(found.cluster.device.memory * (1 + MORE)) - found.limits.reserve
    admitted = [p for p in found.priced if found.capacity < p.memory <= more and p.seconds < best.seconds * 0.995]
    if not admitted:
        return ""
    one = min(admitted, key=lambda p: p.seconds)
    missing = memory(one.memory - found.capacity)
    return (
        f"With {missing} more memory {one.candidate} would fit and be {percent(1 - one.seconds / best.seconds)} faster."
    )
