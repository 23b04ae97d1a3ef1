"""What one device can do: peak rates, memory, and how much of the peaks real kernels reach."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Efficiency:
    """The fitted constants of a device. They are the same for every program and every source of measurements."""

    matmul: float = 0.8
    """The share of the peak that a large matrix product reaches."""
    matmul_half: float = 128.0
    """The size of a dim at which a matrix product reaches half of that (a saturation in each of m, n and k)."""
    unaligned: float = 0.5
    """How much of that is left where the rows of an operand do not begin at multiples of 16 bytes."""
    attention: float = 0.5
    """The share of the peak that a long fused attention reaches, forward."""
    attention_backward: float = 0.4
    attention_half: float = 0.0
    """The number of keys at which a fused attention reaches half of that."""
    attention_first: float = 0.7
    """What the first generation of fused attention kernels reaches, as a share of the above."""
    memory: float = 0.8
    """The share of the memory bandwidth that elementwise kernels reach."""
    launch: float = 5e-6
    """Seconds between two kernels that are too short to hide their launch."""
    reserve: int = 0
    """Bytes that the driver, libraries and communicators take before the program has any."""
    fragmentation: float = 0.0
    """The share of a program's peak that the allocator wastes."""
    in_flight: float = 0.0
    """The share of what the microbatches of a pipeline keep while they are in flight that it wastes besides."""
    contention: float = 0.0
    """How much longer kernels take while messages are on the links, as a share."""


@dataclass(frozen=True)
class Device:
    name: str
    flops: Mapping[str, float] = field(hash=False)
    """Dense peak FLOP/s by short dtype name (``bf16``, ``f32``, ...)."""
    memory: int
    """Bytes."""
    bandwidth: float
    """Bytes per second of the device's memory."""
    host_link: float
    """Bytes per second between device and host memory, one way."""
    efficiency: Efficiency = field(default_factory=Efficiency)
    sources: Mapping[str, str] = field(default_factory=dict, hash=False)

    @property
    def is_host(self) -> bool:
        """Whether kernels run on the host that issues them, so that launching one is part of running it."""
        return self.name.startswith("cpu")
