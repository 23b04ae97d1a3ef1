"""The captured training step: three FX graphs without a word about ranks, and what their values are.

``prologue``  batch -> values that depend on the batch alone (the number of valid tokens)
``micro``     parameters, buffers, batch, prologue values, random key -> loss, gradients, buffers
``update``    parameters, gradients, optimizer state, scalars -> parameters, state, gradient norm
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import fx

from meshwright.compiler.diagnostics import Origin
from meshwright.compiler.mesh import Sharding

Kind = Literal[
    "parameter",  # a logical parameter, by its canonical name
    "buffer",  # a buffer of the module, by name
    "batch",  # a tensor of the batch, by its path ("input_ids", "0", "labels")
    "prologue",  # a value computed by the prologue, by its node name
    "key",  # the random key of the step: an int64 tensor of shape [2] (seed, step)
    "gradient",  # the gradient of a trainable parameter, by the parameter's name
    "state",  # optimizer state, "<parameter>/<entry>" ("model.w/exp_avg", "model.w/step")
    "scalar",  # a number that the host gives each step, "<group>/<entry>" ("0/lr"): float64 tensor of shape []
    "constant",  # a tensor evaluated at compile time, by name (in StepProgram.constants)
    "loss",  # the loss of the whole batch (micro: the part that the microbatch owes), shape []
    "norm",  # the global gradient norm before clipping, shape []
    "value",  # what another piece of a pipeline makes, by its node name
    "result",  # a further output of the user's step (metrics)
]


MASTER_COPY = "master"
"""The entry of a parameter's optimizer state that is its copy in fp32. Only what begins as its parameter is one."""


@dataclass(frozen=True)
class Value:
    """What an input or output of a graph is."""

    kind: Kind
    name: str


@dataclass(frozen=True)
class Signature:
    """The roles of a graph's placeholders and of the elements of its output tuple, in order."""

    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]


@dataclass(frozen=True)
class TensorSpec:
    """The whole (unsharded) shape and dtype of a parameter, buffer, state or batch tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class Parameter:
    """One logical parameter. ``aliases`` are the further names of a tied one."""

    name: str
    spec: TensorSpec
    trainable: bool = True
    aliases: tuple[str, ...] = ()
    group: int = 0
    """The index of its optimizer parameter group; -1 if the optimizer does not own it."""


@dataclass
class Annotation:
    """The typed annotations of a node, kept in ``node.meta["meshwright"]``."""

    shape: tuple[int, ...] = ()
    dtype: torch.dtype | None = None
    sharding: Sharding | None = None
    origin: Origin = field(default_factory=Origin)
    block: str = ""
    """The repeated region that the node belongs to, a module path such as ``model.layers.3``."""
    phase: Literal["forward", "backward", "update", "prologue"] = "forward"
    recomputed: bool = False
    """Whether it does again, in backward, what forward has done."""


def annotation(node: fx.Node) -> Annotation:
    """The node's annotation, made on first use from its fake value."""
    found = node.meta.get("meshwright")
    if isinstance(found, Annotation):
        return found
    value = node.meta.get("val")
    made = Annotation()
    if isinstance(value, torch.Tensor):
        made = Annotation(shape=tuple(int(n) for n in value.shape), dtype=value.dtype)
    node.meta["meshwright"] = made
    return made


@dataclass
class Graph:
    """One of the three graphs: an FX module whose placeholders and outputs have roles.

    Every node that yields tensors carries ``meta["val"]`` (fake tensors of whole shapes) and an
    :class:`Annotation`.
    """

    module: fx.GraphModule
    signature: Signature

    def placeholders(self) -> dict[Value, fx.Node]:
        nodes = [n for n in self.module.graph.nodes if n.op == "placeholder"]
        return dict(zip(self.signature.inputs, nodes, strict=True))

    def outputs(self) -> dict[Value, Any]:
        (output,) = (n for n in self.module.graph.nodes if n.op == "output")
        return dict(zip(self.signature.outputs, output.args[0], strict=True))


@dataclass
class StepProgram:
    """A training step for one device. All shapes are those of the whole global batch."""

    prologue: Graph
    micro: Graph
    update: Graph
    parameters: tuple[Parameter, ...]
    buffers: dict[str, TensorSpec]
    batch: dict[str, TensorSpec]
    batch_dims: dict[str, int | None]
    """Which dim of each batch tensor is the batch (None: shared by all samples)."""
    state: dict[str, TensorSpec]
    """Optimizer state by ``<parameter>/<entry>``."""
    state_init: dict[str, float]
    """The value that fills each state tensor before the first step (0 for AdamW's moments). State that is not here
    begins as its parameter (a master copy)."""
    scalars: dict[str, float]
    """The scalars the host feeds and their values at capture (``0/lr``)."""
    constants: dict[str, torch.Tensor]
    batch_size: int
    fingerprint: str = ""
    """A hash of parameters' names, shapes, dtypes and of the graphs; plans are checked against it."""
    loss_as_written: torch.dtype | None = None
    """The dtype in which torch alone computes the loss, if no precision was asked for: cross entropies are widened."""

    def begins_as_its_parameter(self, state: str) -> bool:
        """Whether this optimizer state is a copy of its parameter (a master copy), and so without a value of its own
        before the first step."""
        return state in self.state and state not in self.state_init and state.rpartition("/")[2] == MASTER_COPY

    def parameter(self, name: str) -> Parameter:
        """The logical parameter of that name or alias. Raises KeyError."""
        for p in self.parameters:
            if name == p.name or name in p.aliases:
                return p
        raise KeyError(name)
