"""The plan: what is decided about a program on a mesh. Data that a person can read, edit and diff."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from meshwright.compiler.mesh import Mesh, Sharding


def pattern_expression(pattern: str) -> re.Pattern[str]:
    """The regular expression of a name pattern: ``*`` stands for one part of a dotted name, or some of it;
    ``**`` for any number of parts."""
    pieces = [{"**": ".*", "*": "[^.]*"}.get(p, re.escape(p)) for p in re.split(r"(\*\*|\*)", pattern)]
    return re.compile("".join(pieces))


@dataclass(frozen=True)
class ParameterPlan:
    """How the parameters that a pattern names are cut while they are computed with.

    ``pattern`` is read by :func:`pattern_expression` over canonical names and aliases
    (``model.layers.*.q_proj.weight``); the first entry that matches a parameter counts. ``rest``,
    ``gradient`` and ``state`` override what the plan's ``storage`` axes would give.
    """

    pattern: str
    compute: Sharding
    rest: Sharding | None = None
    gradient: Sharding | None = None
    state: Sharding | None = None


@dataclass(frozen=True)
class Storage:
    """The axes over which parameters, gradient accumulators and optimizer state are stored in shards.

    All empty: plain data parallelism. ``state`` alone: ZeRO-1. ``state`` and ``gradients``: ZeRO-2.
    All three: ZeRO-3, that is, fully sharded.
    """

    parameters: tuple[str, ...] = ()
    gradients: tuple[str, ...] = ()
    state: tuple[str, ...] = ()


@dataclass(frozen=True)
class Precision:
    """Names of dtypes: of computation, of weights at rest, of gradient reduction and accumulation."""

    compute: str = "fp32"
    weights: str = "fp32"
    reduce: str = "fp32"


HALVES = ("bf16", "fp16")
"""The dtypes of 16 bits."""

Numerics = Literal["safe", "warn", "as-written"]
"""What becomes of sums that half precision spoils: they are taken in fp32; they are told; they stay as they are."""

Offload = Literal["state"]

Save = Literal["nothing", "matmuls", "all"]
"""What a block keeps of its forward pass for backward, besides its inputs: nothing; the results of matrix products,
attention and collectives (what is cheap is computed again); everything."""


@dataclass(frozen=True)
class Recompute:
    """What the blocks that a pattern names keep for backward; the first entry that matches a block counts.

    ``pattern`` is read by :func:`pattern_expression` over block names (``model.layers.*``). ``every``: of the blocks
    that match, in order, only every k-th is treated so (1: all), the others keep everything.
    """

    pattern: str
    save: Save = "nothing"
    every: int = 1


Meaning = Literal["per microbatch", "per data rank", "global"]
"""Over which samples something that couples the batch (a batch statistic, say) is computed."""


@dataclass(frozen=True)
class Declaration:
    """What couplings of samples mean when the batch is cut into microbatches; the first entry that fits one counts.

    ``pattern`` is read by :func:`pattern_expression` over what a coupling is called: the path of the module that it
    stands in (``encoder.*.norm``), the line of its source (``model.py:31``), and its kind (``batch statistic``).
    """

    pattern: str
    meaning: Meaning


PIPE = "pipe"
"""The mesh axis along which the stages of a pipeline lie."""


@dataclass(frozen=True)
class Pipeline:
    """How blocks are cut by depth over the axis ``pipe``, and in which order the passes of the stages run.

    With v stages on each of p ranks there are v*p - 1 ``first_blocks``. The plan's microbatches go through the stages.
    """

    first_blocks: tuple[str, ...]
    """The blocks that the stages after the first begin with, in the model's order."""
    schedule: str = "1f1b"
    """A name of ``compiler/schedules``."""
    table: str = ""
    """What every rank does, a line for each, in the form of :mod:`meshwright.compiler.schedules.table`; empty: what the
    schedule of that name does where all passes take as long."""


@dataclass(frozen=True)
class Hashes:
    """What the plan was made for; checked on load."""

    model: str = ""
    torch: str = ""
    cluster: str = ""
    """Of the cluster that it was chosen for; told, not checked: a plan may run anywhere."""
    outline: str = ""
    """Of parameters and batch alone: of a plan for which not all layers of the model were captured."""


@dataclass(frozen=True)
class Predicted:
    """What was predicted of a step when the plan was chosen. Seconds and bytes of one rank."""

    cluster: str
    """The name of the cluster."""
    step_time: float
    tokens_per_second: float
    mfu: float
    device_memory: int
    """With what driver and allocator take."""
    memory: Mapping[str, int]
    """By kind, at the peak."""
    compute: Mapping[str, float]
    """By kind of kernel."""
    exposed: Mapping[str, float]
    """By mesh axes: waiting for their messages."""
    other: Mapping[str, float]
    """``launch``, ``transfer``, ..."""


@dataclass(frozen=True)
class Plan:
    mesh: Mesh
    batch: tuple[str, ...] = ()
    """The axes that cut the batch."""
    microbatches: int = 1
    storage: Storage = field(default_factory=Storage)
    sequence: tuple[str, ...] = ()
    """The axes over which activations between tensor-parallel regions are cut along time."""
    parameters: tuple[ParameterPlan, ...] = ()
    precision: Precision = field(default_factory=Precision)
    numerics: Numerics = "warn"
    recompute: tuple[Recompute, ...] = ()
    offload: tuple[Offload, ...] = ()
    """What is kept in the host's memory and brought to the device when it is needed."""
    prefetch: int = 0
    """How many blocks ahead stored weights are gathered, beside the computation; 0: when they are needed. With 1 or
    more, gradients are reduced beside the computation too."""
    separability: tuple[Declaration, ...] = ()
    """Of what couples the samples of the batch. What no entry fits may not be cut into microbatches."""
    pipeline: Pipeline | None = None
    """Only where the mesh has the axis ``pipe``."""
    hashes: Hashes = field(default_factory=Hashes)
    name: str = ""
    """The preset that made it, for people."""
    predicted: Predicted | None = field(default=None, compare=False)
    reasons: tuple[str, ...] = field(default=(), compare=False)
    """Why it was chosen, sentence by sentence."""

    @property
    def accumulate(self) -> str:
        """The dtype in which gradients are added up over microbatches, unless their own is wider."""
        return "fp32" if self.numerics == "safe" and self.precision.reduce in HALVES else self.precision.reduce
