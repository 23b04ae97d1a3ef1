"""From a batch to the shards that a rank reads, whether the batch is whole in memory or read by rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, fx

from meshwright.compiler.analysis.bounds import Bound, index_bounds
from meshwright.compiler.diagnostics import error, input_name, suggestion
from meshwright.compiler.graph.program import StepProgram
from meshwright.compiler.mesh import Mesh, Segment, Sharding
from meshwright.runtime.layout import Coordinates, positions, take_shard
from meshwright.runtime.step_executor import Feed

Rows = Callable[[str, list[int]], Tensor]
"""Gives rows of the global batch of a step: a tensor's name and the rows' numbers, in any order.
The result has the batch at the tensor's batch dim."""


def whole_batch(batch: Mapping[str, Tensor], program: StepProgram) -> Feed:
    """A feed of a batch that is whole in memory. Raises MeshwrightError E0608 if it does not fit the program."""
    check_batch(batch, program)

    def feed(name: str, sharding: Sharding, mesh: Mesh, coordinates: Coordinates) -> Tensor:
        return take_shard(batch[name].to(program.batch[name].dtype), sharding, mesh, coordinates)

    return feed


def batch_by_rows(rows: Rows, program: StepProgram) -> Feed:
    """A feed that reads only the rows of the batch that the rank needs."""

    def feed(name: str, sharding: Sharding, mesh: Mesh, coordinates: Coordinates) -> Tensor:
        spec, dim = program.batch[name], program.batch_dims[name]
        if dim is None:
            return take_shard(rows(name, []).to(spec.dtype), sharding, mesh, coordinates)
        index = positions(sharding.dims[dim], mesh, coordinates)
        present = index >= 0
        found = rows(name, index[present].tolist()).to(spec.dtype)
        if not bool(present.all()):
            padded = found.new_zeros([len(index) if d == dim else n for d, n in enumerate(found.shape)])
            found = padded.index_copy_(dim, torch.nonzero(present).flatten(), found)
        # the rows are there; what is left is the cut of the other dims
        dims = tuple((Segment(len(index)),) if d == dim else s for d, s in enumerate(sharding.dims))
        return take_shard(found, Sharding(dims), mesh, coordinates)

    return feed


def _suggestion(name: str, known: Mapping[str, object]) -> str:
    """What to give instead; numbers of positional inputs are no names that one could misspell."""
    if any(n.partition(".")[0].isdigit() for n in (name, *known)):
        return "give the batch in the form of the example that the step was compiled with"
    return suggestion(name, known)


def check_batch(batch: Mapping[str, Tensor], program: StepProgram) -> None:
    """Refuse a batch that has not just the tensors of the program, in its shapes, with indices that exist.

    Raises MeshwrightError E0608, and E0613 for indices.
    """
    for name, spec in program.batch.items():
        if name not in batch:
            raise error("E0608", f"the batch has no {input_name(name)}", action=_suggestion(name, batch))
        if batch[name].is_floating_point() != spec.dtype.is_floating_point:
            raise error(
                "E0608",
                f"{input_name(name)} of the batch has the dtype {batch[name].dtype}, "
                f"the step was compiled for {spec.dtype}",
                action="give the tensor in that dtype",
            )
        shape = tuple(batch[name].shape)
        if shape != spec.shape:
            raise error(
                "E0608",
                f"{input_name(name)} of the batch has the shape {list(shape)}, "
                f"the step was compiled for {list(spec.shape)}",
                action="give the whole global batch in that shape, or compile for this one",
            )
    for name in batch:
        if name not in program.batch:
            raise error(
                "E0608",
                f"the batch has a tensor more, {input_name(name)}, which the step was compiled without",
                action=_suggestion(name, program.batch),
            )
    _check_indices(batch, program)


def _check_indices(batch: Mapping[str, Tensor], program: StepProgram) -> None:
    """Refuse indices of rows and classes that the model does not have. Raises MeshwrightError E0613."""
    bounds = _BOUNDS.get(program.micro.module)
    if bounds is None:
        bounds = _BOUNDS.setdefault(program.micro.module, index_bounds(program))
    for name, bound in bounds.items():
        values = batch[name]
        for ignored in bound.ignored:
            values = values[values != ignored]
        wrong = values[(values < 0) | (values >= bound.size)]
        if len(wrong):
            raise error(
                "E0613",
                f"'{name}' of the batch holds {int(wrong[0])}, the model has rows or classes 0 to {bound.size - 1}",
                action="check the vocabulary size of the model, and the index that marks what is left out",
            )


_BOUNDS: MutableMapping[fx.GraphModule, dict[str, Bound]] = WeakKeyDictionary()
"""By graph: found once, for every batch is checked."""
