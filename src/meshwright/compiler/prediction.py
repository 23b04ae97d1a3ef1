"""What is predicted of a plan on a cluster: time by cause, memory by kind."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace


@dataclass(frozen=True)
class Moment:
    """A point in a step: the item that is being computed."""

    graph: str
    item: str
    phase: str = ""
    block: str = ""


@dataclass(frozen=True)
class Memory:
    """Bytes on every rank (all ranks hold the same sizes, padding included)."""

    peak: int
    at: Moment
    by_kind: Mapping[str, int]
    """What the peak consists of."""
    most: Mapping[str, int]
    """The most that each kind comes to at any moment."""
    by_graph: Mapping[str, int]
    """The peak within each graph."""


@dataclass(frozen=True)
class StagePrediction:
    """One stage of a pipeline. Seconds are those of one microbatch."""

    rank: int
    """Its coordinate along the axis ``pipe``."""
    blocks: int
    forward: float
    input: float
    weight: float
    in_flight: int
    """The most microbatches whose activations it holds at once."""


@dataclass(frozen=True)
class Flow:
    """How microbatches go through the stages of a pipeline."""

    schedule: str
    stages: tuple[StagePrediction, ...]
    bubble: float
    """The share of the step in which the busiest rank waits for others."""
    memory: tuple[int, ...]
    """By ``pipe`` coordinate, the bytes at its peak; :class:`Memory` is that of the one which needs most."""

    @property
    def fullest(self) -> int:
        """The ``pipe`` coordinate that needs most memory."""
        return max(range(len(self.memory)), key=lambda rank: self.memory[rank])


@dataclass(frozen=True)
class Prediction:
    """One step of a plan on a cluster."""

    seconds: float
    compute: Mapping[str, float]
    """Seconds of the device's compute stream by kernel kind, recomputation apart (``recomputed``)."""
    exposed: Mapping[str, float]
    """By mesh axes (joined with commas): seconds in which the compute stream waits for their messages."""
    communication: Mapping[str, float]
    """By mesh axes: seconds in which their messages are on the links, hidden or not."""
    other: Mapping[str, float]
    """``launch``, ``transfer`` (offload), ``bubble``, ...: seconds of the step that are neither."""
    memory: Memory
    device_memory: int
    """Bytes of the allocator's view: the peak, fragmentation and reserve; compared with what the device has."""
    fits: bool
    mfu: float
    """Model FLOPs of the step over what all devices could do in its time, at the peak of the compute dtype."""
    tokens_per_second: float
    spans: tuple[Span, ...] = ()
    flow: Flow | None = None
    """Of a pipeline. Times are then those of its busiest rank, memory that of the fullest."""


def between(memory_of: Prediction, one: Prediction, other: Prediction, share: float) -> Prediction:
    """The memory of a prediction, with times between two others: ``share`` of the first, the rest of the second."""

    def mixed(first: Mapping[str, float], second: Mapping[str, float]) -> dict[str, float]:
        return {
            k: share * first.get(k, 0.0) + (1 - share) * second.get(k, 0.0) for k in dict.fromkeys((*first, *second))
        }

    seconds = share * one.seconds + (1 - share) * other.seconds
    return replace(
        memory_of,
        seconds=seconds,
        compute=mixed(one.compute, other.compute),
        exposed=mixed(one.exposed, other.exposed),
        communication=mixed(one.communication, other.communication),
        other=mixed(one.other, other.other),
        mfu=one.mfu * one.seconds / seconds,
        tokens_per_second=one.tokens_per_second * one.seconds / seconds,
    )


@dataclass(frozen=True)
class Span:
    """Something on the timeline, for export: on which resource, from when to when (seconds)."""

    resource: str
    name: str
    start: float
    end: float
    phase: str = ""
    block: str = ""
    notes: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Execution:
    """How the runtime executes a program: what the simulator must know besides the program."""

    fusion: str = "none"
    """``none``: every op is a kernel; ``kernels``: normalisations, rotary embeddings, gated activations, softmax and
    their likes are one kernel each; ``compiled``: all chains of elementwise ops are fused."""
    attention: str = "flash-2"
    """The generation of the fused attention kernels: ``flash-2``, or ``flash-1`` (FlashAttention 1, Triton's)."""
    waits_for_sends: bool = False
    """Whether a stage of a pipeline computes nothing until what it sends has left; our runtime goes on."""
