"""Fit the few constants of each kind of device on half of the rows.

While constants are tried, a row's kernels are added up, and what else its step takes (waiting for messages and for
the host) is kept from the last simulation; then all rows are simulated anew, three times over.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from benchmarks.published import frameworks
from benchmarks.published.frameworks import execution
from benchmarks.published.predict import simulated
from benchmarks.published.rows import Row
from benchmarks.published.score import chosen_for_fitting
from meshwright.compiler.cluster.cluster import Cluster
from meshwright.compiler.cluster.device import Device, Efficiency
from meshwright.compiler.cluster.kernels import kernel_seconds, with_attention
from meshwright.compiler.summary import Kernel, RankSummary, StagedSummary
from meshwright.compiler.timeline.fusion import fused

Priced = tuple[Row, RankSummary, Cluster]
PricedAny = tuple[Row, RankSummary | StagedSummary, Cluster]
ROUNDS = 3
MOST = 0.2
"""The largest error of a row that counts."""
EXPECTED = (1.5, 0.03)
"""GiB of reserve, and a share of fragmentation."""
FEWEST = 8
"""Rows from which on a device's constants are fitted."""
BOUNDS: Mapping[str, tuple[float, float]] = {
    "matmul": (0.4, 0.95),
    "matmul_half": (8.0, 1024.0),
    "attention": (0.15, 0.8),
    "attention_backward": (0.1, 0.7),
    "attention_first": (0.4, 1.0),
    "memory": (0.4, 0.95),
}
"""What is fitted on step times, and within which limits it means what it says."""
TRIED: Mapping[str, tuple[float, ...]] = {
    "launch": (3e-6, 5e-6, 7e-6, 10e-6, 14e-6, 20e-6),
    "contention": (0.0, 0.03, 0.06, 0.1, 0.15),
}
"""Constants of what is not a kernel's own time: tried with whole simulations."""
RATES_TRIED = (2.5e9, 3e9, 3.5e9, 4e9, 5e9, 6e9, 8e9, 12.5e9, 25e9)
SHARES_TRIED = tuple(n / 50 for n in range(16))


@dataclass(frozen=True)
class Work:
    """A row's step as its kernels, how often each runs, and the seconds in which no kernel runs."""

    row: Row
    device: Device
    kernels: Sequence[tuple[Kernel, int]]
    idle: float

    def error(self, efficiency: Efficiency) -> float:
        """The logarithm of predicted over measured time."""
        device = with_attention(replace(self.device, efficiency=efficiency), self.row.habits.attention)
        busy = sum(count * kernel_seconds(device, kernel) for kernel, count in self.kernels)
        return math.log((busy + self.idle) / (self.row.seconds or 1.0))


def family(name: str) -> str:
    """Devices that differ in their memory alone share their constants (``a100-40`` and ``a100-80``)."""
    return name.partition("-")[0]


def fitted_rows(priced: Sequence[Priced]) -> dict[str, list[str]]:
    """By family of devices whose constants :func:`fit` finds: the rows that it uses."""
    found = {name: sorted({row.id for row, _, _ in members}) for name, members in _groups(priced).items()}
    return dict(sorted(found.items()))


def _groups(priced: Sequence[Priced]) -> dict[str, list[Priced]]:
    groups: dict[str, list[Priced]] = defaultdict(list)
    for one in priced:
        if chosen_for_fitting(one[0]) and (one[0].seconds is not None or one[0].fits is not None):
            groups[family(one[2].device.name)].append(one)
    return {n: m for n, m in groups.items() if sum(row.seconds is not None for row, _, _ in m) >= FEWEST}


def fit(priced: Sequence[Priced], tell: Callable[[str], None]) -> dict[str, Efficiency]:
    """The fitted constants by device; devices with too few rows keep theirs."""
    found: dict[str, Efficiency] = {}
    for name, members in _groups(priced).items():
        timed = [p for p in members if p[0].seconds is not None]
        start = timed[0][2].device.efficiency
        for number in range(ROUNDS):
            start = best_tried(timed, start) if number else start
            works = [work(p, start) for p in timed]
            start = descend(works, start)
            tell(f"{name}, round {number + 1}: mean error {mean_error(works, start):.2%} of {len(works)} rows")
        found.update({p[2].device.name: start for p in priced if family(p[2].device.name) == name})
    reserve, share = fit_memory([p for members in _groups(priced).values() for p in members])
    return {name: replace(known, reserve=reserve, fragmentation=share) for name, known in found.items()}


def best_tried(timed: Sequence[Priced], start: Efficiency) -> Efficiency:
    """The constants of TRIED, one after the other."""
    for name, values in TRIED.items():
        tried = [replace(start, **{name: value}) for value in values]
        start = min(tried, key=lambda efficiency: _simulated_error(timed, efficiency))
    return start


def _simulated_error(timed: Sequence[Priced], efficiency: Efficiency) -> float:
    found = (simulated(row, s, c, {c.device.name: efficiency}).seconds / (row.seconds or 1.0) for row, s, c in timed)
    return sum(_size(math.log(ratio)) for ratio in found) / len(timed)


def work(priced: Priced, efficiency: Efficiency) -> Work:
    row, summary, cluster = priced
    kernels: Counter[Kernel] = Counter()
    for graph, times in ((summary.prologue, 1), (summary.micro, summary.microbatches), (summary.update, 1)):
        for position, kernel in fused(graph, execution(row).fusion).items():
            kernels[kernel] += times * summary.repeats.get(graph.items[position].block, 1)
    found = simulated(row, summary, cluster, {cluster.device.name: efficiency})
    device = with_attention(replace(cluster.device, efficiency=efficiency), row.habits.attention)
    busy = sum(count * kernel_seconds(device, kernel) for kernel, count in kernels.items())
    return Work(row, cluster.device, tuple(kernels.items()), found.seconds - busy)


def mean_error(works: Sequence[Work], efficiency: Efficiency) -> float:
    """The mean size of the errors."""
    return sum(_size(w.error(efficiency)) for w in works) / len(works)


def _size(error: float) -> float:
    """Capped: a row that went wrong for its own reasons shall not pull."""
    return min(abs(error), MOST)


def descend(works: Sequence[Work], start: Efficiency) -> Efficiency:
    """Coordinate descent: each constant in turn up or down by a factor that shrinks."""
    best, least = start, mean_error(works, start)
    step = 1.2
    while step > 1.005:
        moved = False
        for name, (low, high) in BOUNDS.items():
            for factor in (step, 1 / step):
                value = min(high, max(low, getattr(best, name) * factor))
                tried = replace(best, **{name: value})
                error = mean_error(works, tried)
                if error < least * (1 - 1e-5):
                    best, least, moved = tried, error, True
                    break
        if not moved:
            step = math.sqrt(step)
    return best


def fit_rates(priced: Sequence[PricedAny], constants: Mapping[str, Efficiency]) -> dict[str, float]:
    """The rate of each network that no row tells of, by framework: bytes per second and device."""
    found = {}
    for name in frameworks.UNTOLD:
        members = [p for p in chosen(priced, name) if p[0].seconds is not None]

        def error(rate: float, name: str = name, members: Sequence[PricedAny] = members) -> float:
            predicted = (
                simulated(r, s, c, constants, {name: rate}).seconds / (r.seconds or 1.0) for r, s, c in members
            )
            return sum(_size(math.log(ratio)) for ratio in predicted) / len(members)

        if members:
            found[name] = min(RATES_TRIED, key=error)
    return found


def chosen(priced: Sequence[PricedAny], framework: str) -> list[PricedAny]:
    """The rows of a framework on which the rate of its network is fitted, with a pipeline or without."""
    return [p for p in priced if frameworks.of(p[0]) == framework and chosen_for_fitting(p[0])]


def fit_in_flight(priced: Sequence[PricedAny], rates: Mapping[str, float]) -> float:
    """The share of what microbatches in flight keep that is wasted: of those that class most rows with a pipeline
    rightly, the middle one."""
    members = [p for p in priced if p[0].layout.pipe > 1 and p[0].fits is not None and chosen_for_fitting(p[0])]

    def right(share: float) -> int:
        efficiency = {c.device.name: replace(c.device.efficiency, in_flight=share) for _, _, c in members}
        return sum(simulated(r, s, c, efficiency, rates).fits == r.fits for r, s, c in members)

    counts = {share: right(share) for share in SHARES_TRIED}
    best = [share for share in SHARES_TRIED if counts[share] == max(counts.values())]
    return best[len(best) // 2]


def fit_memory(members: Sequence[Priced]) -> tuple[int, float]:
    """Reserve and fragmentation that class most rows rightly; of those, what one would expect. They are the driver's
    and the allocator's, so the same for all devices that are fitted."""
    peaks = []
    for row, summary, cluster in members:
        if row.fits is not None:
            found = simulated(row, summary, cluster)
            peaks.append((found.memory.peak, cluster.device.memory, row.fits))

    def quality(pair: tuple[int, float]) -> tuple[float, float]:
        reserve, share = pair
        right = sum((p * (1 + share) + reserve <= m) == fits for p, m, fits in peaks)
        return right, -abs(reserve / (1 << 30) - EXPECTED[0]) - 10 * abs(share - EXPECTED[1])

    return max(((r * (1 << 28), f / 100) for r in range(25) for f in range(21)), key=quality)
