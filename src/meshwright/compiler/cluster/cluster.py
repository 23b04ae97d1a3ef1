"""A cluster: devices, and the nested tiers of links between them."""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.compiler.cluster.device import Device


@dataclass(frozen=True)
class Tier:
    """One level of the hierarchy of links: ``size`` members of the tier below (devices, at the lowest) that reach
    one another over links of this kind."""

    name: str
    size: int
    bandwidth: float
    """Bytes per second, one way, that one device can send through this tier when all do."""
    latency: float
    """Seconds of one hop."""
    efficiency: float = 0.8
    """The share of the bandwidth that collectives reach with large messages."""


@dataclass(frozen=True)
class Cluster:
    """``device`` is the one that all ranks wait for (of mixed devices, the slowest); rank r stands on device r."""

    name: str
    device: Device
    tiers: tuple[Tier, ...]
    """Innermost first; the product of their sizes is the number of devices."""

    @property
    def ranks(self) -> int:
        count = 1
        for tier in self.tiers:
            count *= tier.size
        return count
