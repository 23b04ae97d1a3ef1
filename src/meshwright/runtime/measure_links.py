"""Measures collectives between ranks, all groups at the same time."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from meshwright.compiler.cluster.fitting import Sent
from meshwright.compiler.summary import MessageKind
from meshwright.runtime.measure_kernels import WINDOWS, synchronize
from meshwright.runtime.measure_memory import most_taken
from meshwright.runtime.torch_distributed import all_gather_single, reduce_scatter_single

BUDGET = 0.08
"""Seconds for one collective of one size."""
SIZES = (1 << 12, 1 << 17, 1 << 21, 1 << 24)
"""Payloads on CPUs; on GPUs they are 16 times larger from the second on."""


def measure_collectives(group: Sequence[int], handle: dist.ProcessGroup, device: torch.device) -> list[Sent]:
    """All kinds over this rank's group, while the other ranks do the same in theirs."""
    sizes = SIZES if device.type == "cpu" else (SIZES[0], *(16 * s for s in SIZES[1:]))
    return [
        Sent(kind, len(group), payload, _seconds(run, device), most_taken(run, device))
        for payload in sizes
        for kind, run in _collectives(len(group), handle, device, payload)
    ]


def _collectives(
    members: int, handle: dist.ProcessGroup, device: torch.device, payload: int
) -> list[tuple[MessageKind, Callable[[], object]]]:
    whole = torch.ones(payload // 4 // members * members, device=device)
    part = torch.ones(whole.numel() // members, device=device)
    other = torch.empty_like(whole)
    return [
        ("all-reduce", lambda: dist.all_reduce(whole.fill_(1.0), group=handle)),
        ("all-gather", lambda: all_gather_single(whole, part, group=handle)),
        ("reduce-scatter", lambda: reduce_scatter_single(part, whole, group=handle)),
        ("all-to-all", lambda: dist.all_to_all_single(other, whole, group=handle)),
    ]


def _seconds(run: Callable[[], object], device: torch.device) -> float:
    """The mean seconds of a call in the median of three windows. All ranks call equally often, as often as the slowest
    needs for the budget."""
    run()
    once = torch.tensor(_window(run, device, 1), device=device)
    dist.all_reduce(once, dist.ReduceOp.MAX)
    calls = min(100, max(1, int(BUDGET / WINDOWS / once.item())))
    return statistics.median(_window(run, device, calls) for _ in range(WINDOWS))


def _window(run: Callable[[], object], device: torch.device, calls: int) -> float:
    synchronize(device)
    dist.barrier()
    begun = time.perf_counter()
    for _ in range(calls):
        run()
    synchronize(device)
    return (time.perf_counter() - begun) / calls
