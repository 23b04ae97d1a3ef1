"""The update of a rank of a pipeline: its rounds, the messages between them, and new values for further copies.

They are those of :mod:`meshwright.runtime.stage_update`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from meshwright.compiler.analysis.graph_steps import Steps
from meshwright.compiler.analysis.rank_writer import RankWriter
from meshwright.compiler.graph.pipeline_program import PipelineProgram
from meshwright.compiler.graph.program import Value, annotation
from meshwright.compiler.graph.stage_messages import copies_after, moves_after, size_made, size_read
from meshwright.compiler.schedules.instructions import Transfer


def update(
    writer: RankWriter, compiled: PipelineProgram, rounds: Sequence[Sequence[Steps]], needs: tuple[str, ...]
) -> tuple[str, ...]:
    """Write the update, whose first round needs some values, and return the values that there are then. ``rounds``: by
    stage."""
    mine = compiled.updated_by(writer.pipe)
    for at in range(len(compiled.stages[0].update)):
        for stage in mine:
            name = f"round {at} of the update of stage {stage}"
            writer.run(rounds[stage][at], name, needs, (name,))
            needs = (*needs, name)
        needs = (*needs, *writer.exchange(_moves(compiled, at, writer.pipe), needs))
    return (*needs, *writer.exchange(_copies(compiled, writer.pipe), needs))


def _moves(compiled: PipelineProgram, at: int, pipe: int) -> Iterator[Transfer]:
    """What is handed over after a round. Of what is sent the size is that which it is made with, of what comes that
    which is read."""
    for (source, target), names in moves_after(compiled, at).items():
        value = f"round {at} of the update {source} > {target}"
        if pipe == source:
            made = [compiled.stages[stage].update[at] for stage in compiled.updated_by(pipe)]
            yield Transfer(True, target, value, sum(size_made(made, name) for name in names))
        elif pipe == target:
            later = [g for stage in compiled.updated_by(pipe) for g in compiled.stages[stage].update[at:]]
            yield Transfer(False, source, value, sum(size_read(later, name) for name in names))


def _copies(compiled: PipelineProgram, pipe: int) -> Iterator[Transfer]:
    for name, source, copy, target in copies_after(compiled):
        if pipe in (source, target):
            own, peer = (name, target) if pipe == source else (copy, source)
            yield Transfer(pipe == source, peer, f"new {copy} > {target}", _bytes(compiled, own))


def _bytes(compiled: PipelineProgram, name: str) -> int:
    """What a rank holds of a parameter."""
    value = Value("parameter", name)
    dtype = compiled.program.parameter(compiled.copies.get(name, name)).spec.dtype
    for graph in (*compiled.micro_graphs, *compiled.update_graphs):
        if value in graph.inputs:
            nodes = graph.module.graph.find_nodes(op="placeholder")
            dtype = annotation(nodes[graph.signature.inputs.index(value)]).dtype or dtype
            break
    return math.prod(compiled.layouts[name].rest.local_shape(compiled.mesh)) * dtype.itemsize
