"""What a plan must keep to: the memory that is left free and what is pinned; and how far the search goes."""

from __future__ import annotations

from dataclasses import dataclass, field

from meshwright.compiler.search.pins import Pins


@dataclass(frozen=True)
class Limits:
    """What the search keeps to. The largest global batch is the batch that was captured."""

    reserve: int = 0
    """Bytes of each device's memory that stay free, beyond what the device's own reserve takes."""
    pins: Pins = field(default_factory=Pins)
    budget: int = 24
    """How many candidates are compiled and simulated at most."""
    within: float = 0.03
    """Of plans whose times differ by less than this share, the simplest is chosen."""
