"""What a rank holds between steps: its shards of parameters, buffers and optimizer state.

:func:`held` says how each of them lies, so that materializing, saving, loading and gathering are
each one loop over it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from meshwright.compiler.graph.pipeline_program import Compiled, PipelineProgram, copies_of
from meshwright.compiler.graph.program import TensorSpec, Value
from meshwright.compiler.graph.rank_program import LocalGraph
from meshwright.compiler.mesh import Sharding
from meshwright.compiler.plan import PIPE


@dataclass
class Holdings:
    """The local tensors of one rank, by name. ``state`` is keyed by ``<parameter>/<entry>``."""

    parameters: dict[str, Tensor] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)
    state: dict[str, Tensor] = field(default_factory=dict)

    def of(self, kind: str) -> dict[str, Tensor]:
        """The tensors of a kind: ``parameter``, ``buffer`` or ``state``."""
        return {"parameter": self.parameters, "buffer": self.buffers, "state": self.state}[kind]

    def items(self) -> Iterator[tuple[Value, Tensor]]:
        for kind in ("parameter", "buffer", "state"):
            for name, tensor in self.of(kind).items():
                yield Value(kind, name), tensor


@dataclass(frozen=True)
class Held:
    """How one tensor is held: its sharding between steps, its whole shape and its dtype."""

    sharding: Sharding
    spec: TensorSpec
    holders: tuple[int, ...] | None = None
    """The ``pipe`` coordinates that hold it, first one that changes it; None: all ranks do."""

    def on(self, coordinates: Mapping[str, int]) -> bool:
        """Whether the rank at some coordinates holds it, or a part of it."""
        return self.holders is None or coordinates[PIPE] in self.holders


def held(rank_program: Compiled) -> dict[Value, Held]:
    """All that the ranks of the program hold, parameters first, in the program's order."""
    program = rank_program.program
    wanted: dict[Value, tuple[torch.dtype | None, Sharding]] = {}
    for graph in (*rank_program.micro_graphs, *rank_program.update_graphs):
        for value, dtype in input_dtypes(graph).items():
            if value.kind in ("parameter", "buffer", "state"):
                wanted.setdefault(value, (dtype, graph.inputs[value]))
    result: dict[Value, Held] = {}

    def hold(value: Value, sharding: Sharding, spec: TensorSpec, dtype: torch.dtype) -> None:
        holders = rank_program.holders(value) if isinstance(rank_program, PipelineProgram) else None
        result[value] = Held(sharding, TensorSpec(spec.shape, dtype), holders)

    specs = {p.name: p.spec for p in program.parameters}
    specs |= {copy: specs[name] for copy, name in copies_of(rank_program).items()}
    for name, spec in specs.items():
        value = Value("parameter", name)
        dtype, _ = wanted.get(value, (None, None))
        hold(value, rank_program.layouts[name].rest, spec, dtype or spec.dtype)
    for name, spec in program.buffers.items():
        value = Value("buffer", name)
        _, sharding = wanted.get(value, (None, None))
        hold(value, sharding or Sharding.whole(spec.shape), spec, spec.dtype)
    for name, spec in program.state.items():
        value = Value("state", name)
        dtype, _ = wanted.get(value, (None, None))
        hold(value, rank_program.state[name], spec, dtype or spec.dtype)
    return result


def input_dtype(graph: LocalGraph, value: Value) -> torch.dtype | None:
    """The dtype that a graph expects of an input, if it has that input and says so."""
    return input_dtypes(graph).get(value)


def input_dtypes(graph: LocalGraph) -> dict[Value, torch.dtype | None]:
    """The dtypes that a graph expects of all its inputs, as far as it says so."""
    nodes = graph.module.graph.find_nodes(op="placeholder")
    examples = [node.meta.get("val") for node in nodes]
    dtypes = [example.dtype if isinstance(example, Tensor) else None for example in examples]
    return dict(zip(graph.signature.inputs, dtypes, strict=True))
