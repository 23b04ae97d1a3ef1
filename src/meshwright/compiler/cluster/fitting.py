"""Fits the constants of a device and of its links to measured seconds. Free of torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from meshwright.compiler.cluster.cluster import MOST_GROWTH, Collective, Tier
from meshwright.compiler.cluster.device import Device
from meshwright.compiler.cluster.kernels import kernel_seconds
from meshwright.compiler.summary import Kernel, MessageKind

_MATMUL = ("matmul", "matmul_half")
_HOPS_SHARE = 0.6
"""How much of a small message's time in a small group hops can be; what it takes longer in a large one may be more."""
_SHARES = tuple(0.02 * 1.08**i for i in range(66))
_HALVES = tuple(2.0 * 1.25**i for i in range(32))


@dataclass(frozen=True)
class Timed:
    """A kernel and the seconds that it took, all ranks computing at the same time."""

    kernel: Kernel
    seconds: float


@dataclass(frozen=True)
class Sent:
    """A collective over ``members`` ranks, and its seconds. ``payload`` is the larger side in bytes."""

    kind: MessageKind
    members: int
    payload: int
    seconds: float
    taken: int = 0
    """Bytes that the library took meanwhile."""
    passing: int = 0
    """Those of them that it gave back before the message was waited for."""

    @property
    def moved(self) -> float:
        """The bytes that go past a member: those that bus bandwidths are told in."""
        return (2 if self.kind == "all-reduce" else 1) * self.payload * (self.members - 1) / self.members


def fit_device(device: Device, timed: Sequence[Timed]) -> Device:
    """The device with the efficiencies that fit best; its peak rates and bandwidth are taken as they are."""
    device = _best(device, "memory", _SHARES, [t for t in timed if t.kernel.kind not in ("matmul", "attention")])
    matmuls = [t for t in timed if t.kernel.kind == "matmul"]
    if matmuls:
        tried = (
            _best(_with(device, "matmul_half", half), "matmul", _SHARES, matmuls)
            for half in _HALVES
        )  # fmt: skip
        device = min(tried, key=lambda d: _error(d, matmuls))
    return _fit_attention(device, [t for t in timed if t.kernel.kind == "attention"])


def _fit_attention(device: Device, attention: Sequence[Timed]) -> Device:
    """With a saturation in the number of keys where several are measured."""
    if not attention:
        return device
    backward = [t for t in attention if "backward" in t.kernel.op]
    forward = [t for t in attention if t not in backward]
    halves = _HALVES if len({t.kernel.sizes[3] for t in attention}) > 1 else ()
    tried = []
    for half in (0.0, *halves):
        made = _best(_with(device, "attention_half", half), "attention", _SHARES, forward)
        tried.append(_best(made, "attention_backward", _SHARES, backward))
    return min(tried, key=lambda d: _error(d, attention))


def _with(device: Device, name: str, value: float) -> Device:
    found: dict[str, Any] = {name: _digits(value)}
    return replace(device, efficiency=replace(device.efficiency, **found))


def _best(device: Device, name: str, values: Iterable[float], timed: Sequence[Timed]) -> Device:
    if not timed:
        return device
    return min((_with(device, name, value) for value in values), key=lambda d: _error(d, timed))


def _error(device: Device, timed: Sequence[Timed]) -> float:
    """Mean distance of predicted and measured in logarithms, so that twice and half as long are as bad."""
    launch = device.efficiency.launch if device.is_host else 0.0  # a part of every kernel's time there
    return sum(abs(math.log((kernel_seconds(device, t.kernel) + launch) / t.seconds)) for t in timed) / len(timed)


def error_of(device: Device, timed: Sequence[Timed]) -> float:
    """Predicted over measured seconds of a typical kernel, as a factor of at least 1."""
    return math.exp(_error(device, timed)) if timed else 1.0


def fit_tier(tier: Tier, sent: Sequence[Sent]) -> Tier:
    """The tier with the bandwidth, overheads and efficiencies of measured collectives that cross this tier alone.

    Every kind is a straight line, seconds = overhead + moved bytes / rate. The bandwidth is that of the fastest kind,
    and efficiency 1 means that. Where groups of two sizes are measured, the latency of a hop is what all kinds take
    longer for it, and the growth of the overhead what a kind takes longer besides.
    """
    lines = {kind: _line([s for s in sent if s.kind == kind]) for kind in dict.fromkeys(s.kind for s in sent)}
    lines = {kind: line for kind, line in lines.items() if line[1] > 0}
    if not lines:
        return tier
    bandwidth = max(rate for _, rate in lines.values())
    latency = _hop(sent)
    collectives = []
    for kind, (overhead, rate) in lines.items():
        members = max(s.members for s in sent if s.kind == kind)
        fixed, growth = max(0.0, overhead - latency * _hops(kind, members)), 0.0
        few = [s for s in sent if s.kind == kind and s.members < members]
        if few and fixed:
            less = max(s.members for s in few)
            small = min((s for s in few if s.members == less), key=lambda s: s.payload)
            start = max(_line(few)[0] - latency * _hops(kind, less), (1 - _HOPS_SHARE) * small.seconds)
            growth = round(max(0.0, math.log(fixed / start) / math.log((members - 1) / (less - 1))), 2)
            growth = min(growth, MOST_GROWTH)
            fixed /= (members - 1) ** growth
        large = max((s for s in sent if s.kind == kind), key=lambda s: s.payload)
        staging, passing = (round(size / large.payload, 2) for size in (large.taken, large.passing))
        share = float(f"{rate / bandwidth:.4g}")
        collectives.append(Collective(kind, share, _digits(fixed), staging, growth, passing))
    return replace(
        tier,
        bandwidth=_digits(bandwidth),
        latency=_digits(latency),
        efficiency=min(c.efficiency for c in collectives),
        overhead=max(c.overhead for c in collectives),
        collectives=tuple(collectives),
    )


def _line(sent: Sequence[Sent], at: Callable[[Sent], float] = lambda s: s.moved) -> tuple[float, float]:
    """Overhead and rate of the line through the largest group's messages, by least squares of relative errors."""
    members = max(s.members for s in sent)
    points = [(at(s), s.seconds) for s in sent if s.members == members]
    w = [1 / seconds**2 for _, seconds in points]
    total = sum(w)
    x = sum(wi * xi for wi, (xi, _) in zip(w, points, strict=True)) / total
    y = sum(wi * yi for wi, (_, yi) in zip(w, points, strict=True)) / total
    spread = sum(wi * (xi - x) ** 2 for wi, (xi, _) in zip(w, points, strict=True))
    slope = sum(wi * (xi - x) * (yi - y) for wi, (xi, yi) in zip(w, points, strict=True)) / spread if spread else 0.0
    largest, longest = max(points)
    if slope <= 0:
        return 0.0, largest / longest
    if y < slope * x:  # a line through the origin fits best
        return 0.0, sum(wi * xi * xi for wi, (xi, _) in zip(w, points, strict=True)) / sum(
            wi * xi * yi for wi, (xi, yi) in zip(w, points, strict=True)
        )
    return y - slope * x, 1 / slope


def _hops(kind: str, members: int) -> float:
    """The hops that the cost model charges, of a tree for an all-reduce where that is shorter."""
    if kind == "all-reduce":
        return min(2 * (members - 1), 2 * math.ceil(math.log2(members)))
    return max(1.0, (members - 1) / 8) if kind == "all-to-all" else members - 1


def _hop(sent: Sequence[Sent]) -> float:
    """Seconds of a hop: what a small message takes longer in a larger group, for each further hop."""
    found = []
    for kind in dict.fromkeys(s.kind for s in sent):
        small = sorted((s for s in sent if s.kind == kind), key=lambda s: s.payload)
        few = min(small, key=lambda s: (s.members, s.payload))
        many = min(small, key=lambda s: (-s.members, s.payload))
        hops = _hops(kind, many.members) - _hops(kind, few.members)
        if hops > 0:
            most = _HOPS_SHARE * few.seconds / _hops(kind, few.members)
            found.append(min(most, max(0.0, (many.seconds - few.seconds) / hops)))
    return min(found) if found else 0.0


def _digits(value: float) -> float:
    return float(f"{value:.4g}")
