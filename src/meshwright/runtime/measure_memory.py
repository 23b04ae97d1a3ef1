"""Measures what torch's allocator gives out while something runs."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from typing import TypeVar

import torch

T = TypeVar("T")

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # torch's profiler tells of its own start and end otherwise


def most_taken(run: Callable[[], object], device: torch.device) -> int:
    """The most bytes that are allocated at once during a call, beyond those before it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        run()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    return allocated(run)[1]


def still_taken(run: Callable[[], T], device: torch.device, end: Callable[[T], object]) -> int:
    """The bytes that are still allocated after a call, while what it returns is held; ``end`` gets it then."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        result = run()
        torch.cuda.synchronize(device)
        taken = torch.cuda.memory_allocated(device) - before
        end(result)
        return taken
    results: list[T] = []
    taken = allocated(lambda: results.append(run()))[0]
    end(results.pop())
    return taken


def allocated(run: Callable[[], object]) -> tuple[int, int]:
    """Of the CPU: the bytes that a call leaves allocated, and the most that were at once; both beyond those before it,
    as torch's profiler sees them. It does not see what other threads than the caller's free."""
    gc.collect()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as found:
        run()
    results = found.profiler
    assert results is not None and results.kineto_results is not None
    events = [e for e in results.kineto_results.events() if e.name() == "[memory]"]
    now = most = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        if event.device_type().name == "CPU":
            now += event.nbytes()
            most = max(most, now)
    return now, most
