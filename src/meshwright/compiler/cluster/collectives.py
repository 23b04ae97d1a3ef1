"""How long a collective takes on the links that its group crosses.

Bandwidth: a ring over ``n`` members moves ``(n - 1) / n`` of the payload past every member (twice for an all-reduce).
Of that, each of the ``inside`` members of a unit carries its share out of the unit over its own links (its own NIC,
say), since all devices of a node send at once. All tiers work at the same time, as the rings are pipelined, so the
slowest one counts and not the sum. An all-to-all sends each member's part straight to its owner: a tier carries what
leaves the unit below it.

Latency: a ring makes a hop to each further member, over the tier that lies between; an all-reduce may instead go up
and down a tree, whichever is faster (as NCCL chooses, whose constants the tiers of the catalogue have). Small messages
reach only a part of the rate (:attr:`Tier.ramp`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from meshwright.compiler.cluster.cluster import Cluster, Tier
from meshwright.compiler.cluster.crossing import Crossing, crossings
from meshwright.compiler.mesh import Mesh
from meshwright.compiler.summary import MessageKind

CONCURRENT_PEERS = 8
"""Members to which an all-to-all sends at the same time; their latencies overlap."""


@dataclass(frozen=True)
class MessageCost:
    seconds: float
    tier: str
    """The slowest tier that it crosses: the link class whose time it takes."""


@lru_cache(maxsize=262144)
def message_cost(cluster: Cluster, mesh: Mesh, axes: tuple[str, ...], kind: MessageKind, payload: int) -> MessageCost:
    """The cost of one collective over the group that ``axes`` span, on the mesh as it is laid onto the cluster
    (rank r of the mesh on device r). ``payload`` is the larger side in bytes, as in :class:`Message`."""
    crossed = crossings(cluster, mesh, axes)
    if not crossed:
        return MessageCost(0.0, cluster.tiers[0].name)
    members = mesh.size(*axes)
    loads = [_load(kind, payload, members, c) for c in crossed]
    slow = max(range(len(crossed)), key=lambda i: loads[i])
    overhead = max(c.tier.overhead_of(kind, max(2, c.fanout)) for c in crossed)
    moving = loads[slow] * slowdown(crossed[slow].tier, payload)
    total = overhead + moving + _latency(kind, members, crossed)
    if kind == "all-reduce":
        total = min(total, *_alternatives(payload, members, crossed, overhead))
    return MessageCost(total, crossed[slow].tier.name)


@lru_cache(maxsize=65536)
def neighbour_cost(cluster: Cluster, mesh: Mesh, axis: str, payload: int) -> MessageCost:
    """The cost of handing ``payload`` bytes to the next rank along an axis, while all ranks do so: over the slowest
    links between neighbours."""
    found = MessageCost(0.0, cluster.tiers[0].name)
    for crossing in crossings(cluster, mesh, (axis,)):
        tier = crossing.tier
        moving = payload / (crossing.bandwidth * tier.efficiency_of("send")) * slowdown(tier, payload)
        seconds = tier.overhead_of("send") + tier.latency + moving
        if seconds > found.seconds:
            found = MessageCost(seconds, tier.name)
    return found


def message_staging(
    cluster: Cluster, mesh: Mesh, axes: tuple[str, ...], kind: MessageKind, payload: int
) -> tuple[int, int]:
    """The bytes that the library takes of its own for a message: until it has been waited for, and only while its
    bytes move."""
    tiers = [c.tier for c in crossings(cluster, mesh, axes)]
    whole = max((t.staging_of(kind) for t in tiers), default=0.0)
    held = max((t.staging_of(kind) - t.passing_of(kind) for t in tiers), default=0.0)
    return int(payload * held), int(payload * whole) - int(payload * held)


def slowdown(tier: Tier, payload: int) -> float:
    """How much longer a message of this size takes than its share of the full rate."""
    if not tier.ramp or tier.floor >= 1:
        return 1.0
    return (payload + tier.ramp) / (payload + tier.floor * tier.ramp)


def _load(kind: MessageKind, payload: int, members: int, crossing: Crossing) -> float:
    """Seconds that a tier's links are busy, at the rate of large messages."""
    rate = crossing.bandwidth * crossing.tier.efficiency_of(kind)
    if kind == "all-to-all":
        return payload * (members - crossing.inside) / members / rate
    passes = 2 if kind == "all-reduce" else 1
    return passes * payload * (members - 1) / members / crossing.inside / rate


def _latency(kind: MessageKind, members: int, crossed: Sequence[Crossing]) -> float:
    if kind == "all-to-all":
        rounds = max(1.0, (members - 1) / CONCURRENT_PEERS)
        return rounds * sum(c.hops * c.tier.latency for c in crossed) / sum(c.hops for c in crossed)
    passes = 2 if kind == "all-reduce" else 1
    return passes * sum(c.hops * c.tier.latency for c in crossed)


def _alternatives(payload: int, members: int, crossed: Sequence[Crossing], overhead: float) -> list[float]:
    """The seconds of an all-reduce over a tree, and with the sums made in the switch of the only tier it crosses."""
    up_and_down = 2 * sum(math.ceil(math.log2(c.fanout)) * c.tier.latency for c in crossed)
    loads = [2 * payload / c.inside / (c.bandwidth * c.tier.efficiency_of("all-reduce")) for c in crossed]
    slow = max(range(len(crossed)), key=lambda i: loads[i])
    found = [overhead + up_and_down + loads[slow] * slowdown(crossed[slow].tier, payload)]
    only = crossed[0]
    if len(crossed) == 1 and only.tier.in_switch:
        moved = payload * (members + 1) / members / (only.bandwidth * only.tier.in_switch)
        found.append(overhead + 2 * only.tier.latency + moved * slowdown(only.tier, payload))
    return found
