"""Measures everything several times over, each time all of it, so that what else a machine does meets all alike.

What is measured once in a row is measured while a neighbour computes, or while it does not. A pass takes a short look
at everything; of several passes the least counts, which no neighbour held up. What a rank takes is the mean over ranks:
where they share cores, the time in which another one computes belongs to it.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from meshwright.compiler.cluster.fitting import Sent, Timed
from meshwright.runtime.measure_kernels import (
    Machine,
    measure_attention,
    measure_elementwise,
    measure_machine,
    measure_matmuls,
)
from meshwright.runtime.measure_links import Beside, measure_collectives, measure_hidden

PASSES = 8


@dataclass(frozen=True)
class Crossing:
    """The groups of ranks that cross a tier alone, and this rank's one."""

    tier: int
    ranks: tuple[int, ...]
    handle: dist.ProcessGroup


@dataclass(frozen=True)
class Readings:
    """What was measured."""

    timed: tuple[Timed, ...]
    machine: Machine
    sent: tuple[tuple[int, Sent], ...]
    """With the number of the tier."""
    hidden: float
    """The share of messages that run beside kernels, by which those do not take longer; 1 without other ranks."""


def crossing(tier: int, rank: int, groups: Sequence[Sequence[int]]) -> Crossing:
    """Make the process groups; all ranks do so in the same order."""
    made = [dist.new_group(list(ranks)) for ranks in groups]
    own = next(i for i, ranks in enumerate(groups) if rank in ranks)
    return Crossing(tier, tuple(groups[own]), made[own])


def measure_passes(
    crossings: Sequence[Crossing], device: torch.device, ranks_here: int, between: Callable[[], object]
) -> Readings:
    """Measure on all ranks at the same time; ``between`` is called after every pass."""
    passes: list[_Pass] = []
    for number in range(PASSES):
        passes.append(_pass(crossings, device, ranks_here, first=not number))
        between()
    first = passes[0]
    return first.with_seconds(min(column) for column in zip(*(p.seconds for p in passes), strict=True))


@dataclass(frozen=True)
class _Pass:
    """What was measured in one pass, and all the seconds in it, one after the other, as means over ranks."""

    timed: list[Timed]
    machine: Machine
    tiers: list[int]
    sent: list[Sent]
    seconds: list[float]

    def with_seconds(self, seconds: Iterable[float]) -> Readings:
        """What these seconds say."""
        left = iter(seconds)

        def beside() -> Beside:
            return Beside(next(left), next(left), next(left))

        return Readings(
            tuple([replace(t, seconds=next(left)) for t in self.timed]),
            replace(self.machine, copy=next(left), launch=next(left)),
            tuple([(tier, replace(s, seconds=beside().longer)) for tier, s in zip(self.tiers, self.sent, strict=True)]),
            min((beside().hidden for _ in dict.fromkeys(self.tiers)), default=1.0),
        )


def _pass(crossings: Sequence[Crossing], device: torch.device, ranks_here: int, *, first: bool) -> _Pass:
    timed = [*measure_matmuls(device), *measure_attention(device), *measure_elementwise(device)]
    machine = measure_machine(device, ranks_here)
    tiers: list[int] = []
    sent: list[Sent] = []
    messages: list[Beside] = []
    for c in crossings:
        for one, beside in measure_collectives(c.ranks, c.handle, device, memory=first):
            tiers.append(c.tier)
            sent.append(one)
            messages.append(beside)
    largest = {c.tier: c for c in sorted(crossings, key=lambda c: len(c.ranks))}
    messages += [measure_hidden(len(c.ranks), c.handle, device) for _, c in sorted(largest.items())]
    seconds = [*(t.seconds for t in timed), machine.copy, machine.launch]
    seconds += [s for b in messages for s in (b.messages, b.kernels, b.together)]
    return _Pass(timed, machine, tiers, sent, _means(seconds))


def _means(values: list[float]) -> list[float]:
    """The means over all ranks."""
    found: list[list[float]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(found, values)
    return [statistics.fmean(column) for column in zip(*found, strict=True)]
