"""A cluster: devices, and the nested tiers of links between them."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from meshwright.compiler.cluster.device import Device

MOST_GROWTH = 4.0
"""The largest power with which an overhead is taken to grow."""


@dataclass(frozen=True)
class Collective:
    """What one kind of collective reaches on a tier, where it differs from the tier's own figures."""

    kind: str
    efficiency: float
    overhead: float
    """Seconds of a call, whatever its size."""
    staging: float = 0.0
    """Bytes that the library takes while a message is under way, per byte of its payload."""
    growth: float = 0.0
    """The power of the members but one with which the overhead grows, given for two members."""
    passing: float = 0.0
    """The part of the staging that is given back when the bytes have moved; the rest is held until the message has been
    waited for."""


@dataclass(frozen=True)
class Tier:
    """One level of the hierarchy of links: ``size`` members of the tier below (devices, at the lowest) that reach
    one another over links of this kind."""

    name: str
    size: int
    bandwidth: float
    """Bytes per second, one way, that one device can send through this tier when all do (oversubscription left out)."""
    latency: float
    """Seconds of one hop."""
    efficiency: float = 0.8
    """The share of the bandwidth that collectives reach with large messages."""
    oversubscription: float = 1.0
    """How much more the members could send than the tier carries (2 for a 2:1 spine)."""
    overhead: float = 0.0
    """Seconds that a collective takes whatever its size."""
    ramp: float = 0.0
    """Bytes of a payload at which the rate is halfway between that of small and of large messages."""
    floor: float = 1.0
    """The rate of small messages as a share of that of large ones."""
    in_switch: float = 0.0
    """The share of the bandwidth that an all-reduce reaches whose sums are made in the switch; 0: it makes none."""
    direct: bool = False
    """Whether every pair of members has a cable of its own, so that few members reach only part of the bandwidth."""
    collectives: tuple[Collective, ...] = ()

    @property
    def rate(self) -> float:
        """Bytes per second of one device when all send, before efficiency."""
        return self.bandwidth / self.oversubscription

    def efficiency_of(self, kind: str) -> float:
        return next((c.efficiency for c in self.collectives if c.kind == kind), self.efficiency)

    def overhead_of(self, kind: str, members: int = 2) -> float:
        """Seconds of a call over so many members of this tier."""
        own = next((c for c in self.collectives if c.kind == kind), None)
        return self.overhead if own is None else own.overhead * (members - 1) ** own.growth

    def staging_of(self, kind: str) -> float:
        return next((c.staging for c in self.collectives if c.kind == kind), 0.0)

    def passing_of(self, kind: str) -> float:
        return next((c.passing for c in self.collectives if c.kind == kind), 0.0)


@dataclass(frozen=True)
class Degraded:
    """Links that are slower than their kind: of a whole tier, of one member of it, or between two.

    ``members`` are numbers of members of the tier (nodes, for the tier that connects nodes), counted through the
    cluster. A collective takes the time of its slowest link, and all ranks wait for the slowest group.
    """

    tier: str
    factor: float
    """The share of the bandwidth that is left."""
    members: tuple[int, ...] = ()
    """None: the whole tier; one: all links of that member; two: what is between them."""


@dataclass(frozen=True)
class Node:
    """A node of an explicit topology: ``count`` devices, or a switch with none."""

    name: str
    count: int = 0
    inner: Tier | None = None
    """The links between the devices of the node; None for a switch or a single device."""


@dataclass(frozen=True)
class Link:
    """A cable between two nodes of an explicit topology, both ways at once. The bandwidth is that of the link, one
    way, shared by all devices that send through it."""

    ends: tuple[str, str]
    bandwidth: float
    latency: float


@dataclass(frozen=True)
class Network:
    """Explicit nodes and links. Devices are numbered in the order of the nodes."""

    nodes: tuple[Node, ...]
    links: tuple[Link, ...]
    """With the bandwidth that degradation leaves."""
    tier: Tier
    """Name, efficiency and latency constants of what crosses nodes; its bandwidth is that of a group of all devices."""

    @property
    def devices(self) -> int:
        return sum(node.count for node in self.nodes)


@dataclass(frozen=True)
class Cluster:
    """``device`` is the one that all ranks wait for (of mixed devices, the slowest); rank r stands on device r."""

    name: str
    device: Device = field(hash=False)
    tiers: tuple[Tier, ...]
    """Innermost first; the product of their sizes is the number of devices. Of an explicit network, a summary."""
    mixed: tuple[tuple[Device, int], ...] = field(default=(), hash=False)
    """Of mixed devices: each kind and how many, in the order of ranks; empty if all are alike."""
    degraded: tuple[Degraded, ...] = ()
    network: Network | None = None
    """Where nodes and links are given one by one; then group bandwidths come from it and not from the tiers."""

    @property
    def ranks(self) -> int:
        return math.prod(tier.size for tier in self.tiers)

    def device_of(self, rank: int) -> Device:
        """The device on which a rank stands."""
        for device, count in self.mixed:
            if rank < count:
                return device
            rank -= count
        return self.device


def slowest(devices: tuple[Device, ...]) -> Device:
    """What all ranks of mixed devices can rely on: the least of every rate and of memory."""
    first = devices[0]
    if all(d == first for d in devices):
        return first
    dtypes = [t for t in first.flops if all(t in d.flops for d in devices)]
    slow = min(devices, key=lambda d: min(d.flops[t] for t in dtypes)) if dtypes else first
    return Device(
        name=" + ".join(dict.fromkeys(d.name for d in devices)),
        flops={t: min(d.flops[t] for d in devices) for t in dtypes},
        memory=min(d.memory for d in devices),
        bandwidth=min(d.bandwidth for d in devices),
        host_link=min(d.host_link for d in devices),
        efficiency=slow.efficiency,
        sources=slow.sources,
    )
