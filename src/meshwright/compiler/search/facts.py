"""What the search must know of a program: a few numbers, read off the captured step once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class ProgramFacts:
    """Sizes of the whole step on one device. Bytes are those of whole tensors, before anything is cut."""

    batch: int
    """Samples of the global batch."""
    tokens: int
    """Tokens of the global batch; 0 if it has none."""
    parameters: int
    """Elements of all parameters."""
    weights: int
    """Bytes of the parameters at rest."""
    gradients: int
    """Bytes of all gradients, in the dtype in which they are added up."""
    state: int
    """Bytes of the optimizer state."""
    compute_weights: int
    """Bytes of the parameters in the dtype of computation: what full sharding gathers."""
    flops: float
    """Floating point operations of a step as captured."""
    dtype: str = "f32"
    """The dtype of computation, by its short name."""
    blocks: Mapping[str, int] = field(default_factory=dict)
    """The kinds of repeated blocks by name pattern (``model.layers.*``), and how many there are of each."""
    stream: int = 0
    """Bytes per sample of what a block hands to the next."""
    logits: int = 0
    """Bytes per sample of the largest value that a lookup table's rows are compared in."""
    kernels: int = 0
    """Kernels of one microbatch."""
    heads: int = 0
    """Attention heads; 0: no attention."""
    key_value_heads: int = 0
    cuts: Mapping[str, int] = field(default_factory=dict)
    """What tensor parallelism may cut, and its size: ``heads``, ``inner`` (the width of an MLP), ``vocabulary``."""

    coupled: tuple[str, ...] = ()
    """What couples samples without a declared meaning, so that the batch cannot be cut into microbatches: its lines and
    kinds."""
    meets: tuple[str, ...] = ()
    """What is declared to be global, where microbatches meet, so that a pipeline needs a schedule that lets them."""

    @property
    def depth(self) -> int:
        """How many repeated blocks there are."""
        return sum(self.blocks.values())

    @property
    def model_state(self) -> int:
        """Bytes of weights, gradients and optimizer state on one device."""
        return self.weights + self.gradients + self.state
