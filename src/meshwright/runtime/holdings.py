"""What a rank holds between steps: its shards of parameters, buffers and optimizer state.

:func:`held` says how each of them lies, so that materializing, saving, loading and gathering are
each one loop over it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from meshwright.compiler.graph.program import TensorSpec, Value
from meshwright.compiler.graph.rank_program import LocalGraph, RankProgram
from meshwright.compiler.mesh import Sharding


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


def held(rank_program: RankProgram) -> dict[Value, Held]:
    """All that every rank of the program holds, parameters first, in the program's order."""
    program = rank_program.program
    result: dict[Value, Held] = {}
    for p in program.parameters:
        value = Value("parameter", p.name)
        dtype = input_dtype(rank_program.micro, value) or input_dtype(rank_program.update, value) or p.spec.dtype
        result[value] = Held(rank_program.layouts[p.name].rest, TensorSpec(p.spec.shape, dtype))
    for name, spec in program.buffers.items():
        value = Value("buffer", name)
        sharding = rank_program.micro.inputs.get(value, Sharding.whole(spec.shape))
        result[value] = Held(sharding, spec)
    for name, spec in program.state.items():
        value = Value("state", name)
        dtype = input_dtype(rank_program.update, value) or spec.dtype
        result[value] = Held(rank_program.state[name], TensorSpec(spec.shape, dtype))
    return result


def input_dtype(graph: LocalGraph, value: Value) -> torch.dtype | None:
    """The dtype that a graph expects of an input, if it has that input and says so."""
    if value not in graph.signature.inputs:
        return None
    nodes = [n for n in graph.module.graph.nodes if n.op == "placeholder"]
    example = nodes[graph.signature.inputs.index(value)].meta.get("val")
    return example.dtype if isinstance(example, Tensor) else None
