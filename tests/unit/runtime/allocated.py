"""What the allocator of the process gives out while a step runs."""

from __future__ import annotations

import gc
from collections.abc import Callable

import torch
from torch.profiler import ProfilerActivity, profile


def most_allocated(function: Callable[[], object]) -> int:
    """The most bytes that are allocated at once during a call, beyond those before it, as torch's profiler saw them.

    What lives in mapped files is not allocated.
    """
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        function()
    results = found.profiler
    assert results is not None and results.kineto_results is not None
    events = [e for e in results.kineto_results.events() if e.name() == "[memory]"]
    now = most = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        if event.device_type() == torch.autograd.DeviceType.CPU:
            now += event.nbytes()
            most = max(most, now)
    return most
