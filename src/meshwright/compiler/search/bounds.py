"""What a candidate needs at least, whatever its program looks like. Prunes candidates before they are priced.

Both bounds hold for every program: what is held throughout, and computing all that was captured at the peak rate.
"""

from __future__ import annotations

from meshwright.compiler.cluster.device import Device
from meshwright.compiler.search.candidate import TENSOR, Candidate
from meshwright.compiler.search.facts import ProgramFacts


def least_memory(candidate: Candidate, facts: ProgramFacts) -> dict[str, int]:
    """Bytes of model state on a rank, by kind, if everything that may be cut is cut evenly."""
    tensor, cut = candidate.size(TENSOR) * candidate.pipe, candidate.cut
    early = candidate.storage == 1 and candidate.prefetch > 0 and candidate.microbatches == 1
    return {
        "parameters": facts.weights // tensor // (cut if candidate.storage == 3 else 1),
        # with one microbatch and early reduction, gradients are in shards as soon as the state is
        "gradients": facts.gradients // tensor // (cut if candidate.storage >= 2 or early else 1),
        "optimizer state": 0 if candidate.offload else facts.state // tensor // cut,
    }


def least_bytes(candidate: Candidate, facts: ProgramFacts) -> int:
    """The sum of :func:`least_memory`, for a device that has nothing else to hold."""
    return sum(least_memory(candidate, facts).values())


def least_seconds(candidate: Candidate, facts: ProgramFacts, device: Device) -> float:
    """The captured floating point operations at the peak of all devices together."""
    return facts.flops / candidate.ranks / peak(device, facts.dtype)


def peak(device: Device, dtype: str) -> float:
    """The peak FLOP/s of a dtype; the highest there is for one that the device does not list."""
    return device.flops.get(dtype) or max(device.flops.values())
