"""Which links the group of some mesh axes crosses, and what each gives one of its members."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from meshwright.compiler.cluster.cluster import Cluster, Degraded, Tier
from meshwright.compiler.cluster.layout import layout, strides
from meshwright.compiler.mesh import Mesh


@dataclass(frozen=True)
class Crossing:
    """One tier that a group crosses."""

    tier: Tier
    bandwidth: float
    """Bytes per second of one member through this tier, before efficiency, while all groups of the same axes send."""
    inside: int
    """Members of the group in one unit below the tier; they share what the ring carries out of it."""
    hops: int
    """Hops of a ring over this tier (one way, without the last that closes it)."""
    fanout: int
    """Units below this tier that the group has in one unit above."""


@lru_cache(maxsize=65536)
def crossings(cluster: Cluster, mesh: Mesh, axes: tuple[str, ...]) -> tuple[Crossing, ...]:
    """Innermost first; empty for a group of one."""
    if mesh.size(*axes) == 1:
        return ()
    if cluster.network is not None:
        from meshwright.compiler.cluster.topology import network_crossings

        return network_crossings(cluster.network, mesh, axes)
    lies = layout(tuple(tier.size for tier in cluster.tiers), mesh, axes)
    found = []
    for level, tier in enumerate(cluster.tiers):
        hops = lies.units[level] - lies.units[level + 1]
        if hops <= 0:
            continue
        fanout = -(-lies.units[level] // lies.units[level + 1])
        bandwidth = tier.rate * left(cluster, level, mesh, axes)
        if tier.direct:
            bandwidth *= min(1.0, (fanout - 1) / (tier.size - 1))
        found.append(Crossing(tier, bandwidth, lies.inside[level], hops, fanout))
    return tuple(found)


def left(cluster: Cluster, level: int, mesh: Mesh, axes: tuple[str, ...]) -> float:
    """The share of a tier's bandwidth that its worst degraded link leaves to the groups of these axes."""
    share = 1.0
    for slow in cluster.degraded:
        if slow.tier == cluster.tiers[level].name and _meets(slow, cluster, level, mesh, axes):
            share = min(share, slow.factor)
    return share


def _meets(slow: Degraded, cluster: Cluster, level: int, mesh: Mesh, axes: tuple[str, ...]) -> bool:
    """Whether some group crosses the degraded links: one that has members in the unit, or in both units."""
    unit = 1
    for tier in cluster.tiers[:level]:
        unit *= tier.size
    if not slow.members:
        return True
    groups = [
        {_group(rank, mesh, axes) for rank in range(m * unit, min((m + 1) * unit, mesh.ranks))} for m in slow.members
    ]
    return bool(set.intersection(*groups))


def _group(rank: int, mesh: Mesh, axes: tuple[str, ...]) -> int:
    """The first rank of the group of a rank, which names the group."""
    steps = strides(mesh)
    for axis in axes:
        stride, size = steps[axis]
        rank -= rank // stride % size * stride
    return rank
