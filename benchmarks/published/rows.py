"""What a published measurement says: model, layout on devices, how the program was run, what was measured."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Shape:
    """A decoder of the transformer family."""

    family: str
    """``gpt``: two products with a pointwise function between them; ``llama``: gated, with rotary positions."""
    layers: int
    hidden: int
    heads: int
    key_value_heads: int
    inner: int
    vocabulary: int
    time: int


@dataclass(frozen=True)
class Layout:
    """How the run was cut."""

    data: int
    tensor: int
    sequence: bool
    zero: int
    inner_data: int
    """Devices over which a hybrid sharded run shards; the others replicate. 0: all."""
    regather: bool
    """Whether gathered weights are dropped after forward (fully sharded) or kept until backward."""
    microbatch: int
    batch: int
    """Samples of the whole step."""
    pipe: int = 1
    virtual: int = 1
    """Stages on each rank of the pipeline."""
    schedule: str = ""
    """Of a pipeline: a name of the compiler's."""

    @property
    def apart(self) -> bool:
        """Whether the schedule computes gradients of weights apart from those of inputs."""
        return self.schedule.startswith("zb")

    @property
    def microbatches(self) -> int:
        return self.batch // (self.microbatch * self.data)


@dataclass(frozen=True)
class Habits:
    """What the row or its source says about how the program was written and run."""

    recompute: str
    """``none``, ``full`` or ``attention`` (the core of attention again)."""
    recomputed_share: float
    """Of all layers; below 1 where every k-th is recomputed."""
    cheap_again: bool
    """Whether layers that are not recomputed keep the results of matrix products and attention alone, and compute what
    is cheap again: what a compiler does that fuses chains of ops, and selection op by op."""
    fused_attention: bool
    attention: str
    """The generation of fused attention kernels: ``flash-1`` or ``flash-2``."""
    fused_norms: bool
    """Whether the module calls a norm that is one op."""
    kernels: str
    """How ops are run: ``none`` (each by itself), ``kernels`` (those written by hand), ``compiled``."""
    master_weights: bool
    """16-bit weights with 32-bit ones in the optimizer's state (Megatron-LM, DeepSpeed); else 32-bit weights that are
    cast (FSDP)."""
    reduce: str
    dropout: bool
    bias: bool
    loss: str
    """``fused`` (one op, which keeps logits alone) or ``plain`` (a log-softmax in 32 bits that is kept, and gathered
    where the vocabulary is cut)."""


@dataclass(frozen=True)
class Machine:
    gpu: str
    per_node: int
    count: int
    interconnect: str


@dataclass(frozen=True)
class Row:
    id: str
    source: str
    tier: str
    shape: Shape
    layout: Layout
    habits: Habits
    machine: Machine
    seconds: float | None
    memory: float | None
    """Peak, GiB."""
    fits: bool | None
    """None: the row says nothing about it."""
    parameters: float | None
    formula: bool
    """Whether the memory is what a formula of the source gives for the program alone, without what the driver takes."""

    @property
    def sweep(self) -> tuple[Any, ...]:
        """Rows of one sweep differ in their plan alone."""
        return (self.source, self.shape, self.machine, self.layout.batch)

    @property
    def group(self) -> str:
        """A model at one length on one kind of device and number of them."""
        s = self.shape
        return f"{self.machine.gpu}/{self.machine.count}/{s.family}-{s.layers}-{s.hidden}/{s.time}"


@dataclass(frozen=True)
class Skipped:
    id: str
    source: str
    reason: str


class Unreadable(Exception):
    """Why a row is skipped."""
