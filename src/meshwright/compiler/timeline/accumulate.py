"""Adding up the gradients of several microbatches, which the runtime does after each microbatch but the first."""

from __future__ import annotations

from meshwright.compiler.summary import Kernel, RankSummary
from meshwright.compiler.timeline.tasks import Piece, Pricing, Task, coalesce


def accumulation(summary: RankSummary, fusion: str, pricing: Pricing) -> list[Task]:
    """One addition for each gradient. Kernels written by hand add to the accumulator where the gradient is computed, so
    that it is neither written apart nor launched apart."""
    if not summary.accumulators:
        return []
    made = [b for b in summary.micro.buffers if b.kind == "gradients"]
    gradients = sum(b.bytes * summary.repeats.get(b.block, 1) for b in made)
    count = max(1, sum(summary.repeats.get(b.block, 1) for b in made))
    total = summary.accumulators
    read, written = (total, max(0, total - gradients)) if fusion == "kernels" else (total + gradients, total)
    seconds = pricing.kernel(Kernel("accumulate", "elementwise", 0.0, read, written))
    if fusion == "kernels":
        return coalesce([Piece(-1, seconds, "elementwise")], 0.0)
    more = (count - 1) * pricing.cluster.device.efficiency.launch if pricing.cluster.device.is_host else 0.0
    return coalesce([Piece(-1, seconds / count + more / count, "elementwise")] * count, pricing.launch)
