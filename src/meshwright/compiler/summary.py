"""What a rank does in one step, free of torch: read off its program, priced by the simulator.

A summary has the ops of a rank program in the order in which they run, with local sizes, and the lifetime of every
buffer. Of a region that repeats (a transformer layer) it holds two copies; the second one stands for all but the first
(``repeats``), so that a summary is as short for 126 layers as for 2. ``analysis/summarize.py`` makes it from a rank
program, ``memory.py`` reads off it what lives when.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from meshwright.compiler.mesh import Mesh

KernelKind = Literal["matmul", "attention", "elementwise", "reduction", "lookup", "copy", "view"]
MessageKind = Literal["all-reduce", "all-gather", "reduce-scatter", "all-to-all"]
TransferDirection = Literal["to device", "to host"]
Phase = Literal["forward", "backward", "update", "prologue"]


KINDS = (
    "parameters",
    "optimizer state",
    "buffers",
    "constants",
    "gradients",
    "batch",
    "gathered parameters",
    "activations",
    "temporaries",
    "communication buffers",
    "workspace",
)
"""What memory is for. Activations are made in forward; ``temporaries`` in backward and update; communication buffers
are joined tensors that messages carry; workspace is what an op takes and gives back while it runs."""


@dataclass(frozen=True)
class Kernel:
    """One op on local operands.

    ``sizes`` are ``(batch, m, n, k)`` of a matmul and ``(batch, heads, queries, keys, channels)`` of an attention,
    whose ``flops`` count what its mask leaves (a causal one: half). A ``view`` costs nothing.
    """

    op: str
    kind: KernelKind
    flops: float
    read: int
    """Bytes of the operands."""
    written: int
    """Bytes of the results."""
    dtype: str = "f32"
    sizes: tuple[int, ...] = ()
    parts: tuple[Kernel, ...] = ()
    """The kernels that it runs one after the other where the op is written in others; none: it is one itself."""
    times: int = 1
    """How often it runs, as a part of another."""

    @property
    def launches(self) -> int:
        """The kernels that the host launches."""
        return sum(part.times for part in self.parts) or 1


@dataclass(frozen=True)
class Message:
    """One collective. ``payload`` is the larger side in bytes: the gathered tensor, the tensor to be reduced.

    An ``asynchronous`` one only begins here; the :class:`Wait` that names it is where its result is needed.
    """

    kind: MessageKind
    axes: tuple[str, ...]
    payload: int
    dtype: str = "f32"
    asynchronous: bool = False
    shared: int = 1
    """Microbatches that have it in common: it is sent once for so many runs of the graph."""


@dataclass(frozen=True)
class Wait:
    """Until an asynchronous message is there. ``message`` is the position of its item."""

    message: int


@dataclass(frozen=True)
class Transfer:
    """A copy between the device and the host's memory (offloaded optimizer state)."""

    direction: TransferDirection
    bytes: int


@dataclass(frozen=True)
class Item:
    """One step of a graph. ``reads`` are positions of items of the same graph (-1: an input of the graph),
    ``read_bytes`` what is read from each."""

    name: str
    phase: Phase
    block: str
    work: Kernel | Message | Wait | Transfer
    reads: tuple[int, ...] = ()
    read_bytes: tuple[int, ...] = ()
    recomputed: bool = False
    """Whether it does again, for backward, what forward has done."""
    home: str = ""
    """Of a step that is cut into stages, what stands in no block: the block whose stage it belongs to;
    :data:`EVERYWHERE`: each stage does it for itself."""


EVERYWHERE = "*"


@dataclass(frozen=True)
class Buffer:
    """A piece of memory and how long it lives: from item ``born`` (-1: from the start) to item ``last``
    (the number of items: to the end). ``kind`` is one of :data:`KINDS`."""

    bytes: int
    kind: str
    born: int
    last: int
    phase: Phase
    block: str
    name: str = ""
    home: str = ""
    """As that of an :class:`Item`."""


@dataclass(frozen=True)
class GraphSummary:
    items: tuple[Item, ...]
    buffers: tuple[Buffer, ...]
    results: frozenset[int] = frozenset()
    """The items whose results leave the graph."""
    found: dict[object, Any] = field(default_factory=dict, init=False, repr=False, compare=False)
    """What has been read off the graph already, by whoever reads it more than once."""


@dataclass(frozen=True)
class RankSummary:
    """A step of one rank; all ranks of a mesh do the same. ``micro`` runs once for every microbatch."""

    mesh: Mesh
    microbatches: int
    prologue: GraphSummary
    micro: GraphSummary
    update: GraphSummary
    held: Mapping[str, int]
    """Bytes held throughout, by kind (parameters, optimizer state, buffers, constants), of all repeats."""
    accumulators: int = 0
    """Bytes of gradient accumulators, of all repeats; 0 with one microbatch."""
    repeats: Mapping[str, int] = field(default_factory=dict)
    """By block: how many equal ones it stands for. Blocks that are not named stand for themselves."""
    model_flops: float = 0.0
    """Floating point operations of the whole global step as captured, recomputation not counted."""
    samples: int = 0
    tokens: int = 0
    """Elements of the global batch's largest integer tensor; 0 if it has none."""


Pass = Literal["F", "I", "W"]
"""A pass of a microbatch through a stage: forward, backward for the gradient of its input, for those of its weights."""
PASSES: tuple[Pass, ...] = ("F", "I", "W")


@dataclass(frozen=True)
class Held:
    """What a rank holds throughout, of one copy of a block or outside of blocks."""

    bytes: int
    kind: str
    block: str = ""
    home: str = ""


@dataclass(frozen=True)
class Kept:
    """What one pass of a microbatch leaves in memory for later ones of the same stage; of the stage that needs it."""

    bytes: int
    kind: str
    made: Pass
    until: Pass
    """The last pass that reads it."""
    block: str = ""
    home: str = ""


@dataclass(frozen=True)
class Border:
    """Bytes of a microbatch that go from rank to rank in front of a block: activations, and their gradients back."""

    forward: int
    backward: int


@dataclass(frozen=True)
class Meeting:
    """How often microbatches meet on the way through a block, forward and back, and whether they meet in its forward
    pass, or in what has its home there, at all."""

    forward: int = 0
    backward: int = 0
    aside: bool = False


@dataclass(frozen=True)
class StagedSummary:
    """A step whose microbatches go through passes, ready to be cut by depth: what a rank would do that had all blocks.

    Blocks, and the homes of what stands in none, say what each stage takes of it. Like a :class:`RankSummary`, it has
    two copies of a repeated block.
    """

    mesh: Mesh
    """Without the axis ``pipe``."""
    microbatches: int
    prologue: GraphSummary
    passes: Mapping[Pass, GraphSummary]
    update: GraphSummary
    blocks: tuple[str, ...]
    """The outermost blocks of the summary, in the order of the forward pass."""
    groups: tuple[tuple[str, str], ...]
    """Of repeated ones: the first copy, and the other one that stands for all further ones; the same twice where there
    is only one."""
    held: tuple[Held, ...]
    """With gradient accumulators, as ``gradients``."""
    kept: tuple[Kept, ...]
    borders: Mapping[str, Border]
    """By block that a stage may begin with."""
    repeats: Mapping[str, int] = field(default_factory=dict)
    model_flops: float = 0.0
    samples: int = 0
    tokens: int = 0
    meetings: Mapping[str, Meeting] = field(default_factory=dict)
    """By block, where microbatches meet on the way through it; empty where they do not."""
