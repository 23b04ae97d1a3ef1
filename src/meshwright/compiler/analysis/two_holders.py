"""Where two ranks hold a stage: the messages that put together what both have of its outputs.

They are those of :mod:`meshwright.runtime.two_directions`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import zip_longest

import torch

from meshwright.compiler.analysis.rank_writer import RankWriter
from meshwright.compiler.graph.dtypes import PRECISIONS
from meshwright.compiler.graph.pipeline_program import PipelineProgram
from meshwright.compiler.graph.stage_messages import BUCKET, buckets, output_note
from meshwright.compiler.mesh import MICRO
from meshwright.compiler.schedules.instructions import Transfer


def put_together(writer: RankWriter, compiled: PipelineProgram, needs: tuple[str, ...]) -> tuple[str, ...]:
    """Write what a rank sends of what it has made (``needs``), and what it gets: the values that come."""
    pipe = writer.pipe
    shared: dict[tuple[int, int], list[int]] = {}
    for stage in sorted(compiled.held_by(pipe)):
        holders = compiled.holders_of(stage)
        if len(holders) == 2:
            shared.setdefault((min(holders), max(holders)), []).append(stage)
    mine = set(compiled.updated_by(pipe))
    came: tuple[str, ...] = ()
    for pair, stages in sorted(shared.items()):
        (other,) = {*pair} - {pipe}
        buffers = [piece for stage in stages for piece in _pieces(compiled, stage, ("buffer",))]
        gets = [p for stage in stages if stage in mine for p in _pieces(compiled, stage, ("gradient", "result"))]
        gives = [p for stage in stages if stage not in mine for p in _pieces(compiled, stage, ("gradient", "result"))]
        for what, leaving, coming in (("buffers", buffers, buffers), ("gradients", gives, gets)):
            sent = [size for holder, size in leaving if holder in (pipe, _BOTH)]
            received = [size for holder, size in coming if holder in (other, _BOTH)]
            for number, sizes in enumerate(zip_longest(_together(sent), _together(received))):
                ways = ((True, f"{pipe} > {other}"), (False, f"{other} > {pipe}"))
                made = (
                    Transfer(sends, other, f"{what} {way}, part {number}", size)
                    for (sends, way), size in zip(ways, sizes, strict=True)
                    if size is not None
                )
                came += writer.exchange(made, needs)
    return came


_BOTH = -1


def _pieces(compiled: PipelineProgram, stage: int, kinds: Sequence[str]) -> Iterator[tuple[int, int]]:
    """What is sent of a stage's outputs: who has it, and its bytes. Of what is added up over microbatches both ranks
    have one, of what is joined each those of its microbatches."""
    schedule = compiled.schedule
    for graph in compiled.stages[stage].passes.values():
        for value, sharding in graph.outputs.items():
            if value.kind not in kinds:
                continue
            note = output_note(graph, value)
            dtype = note.dtype or torch.float32
            if value.kind == "gradient" and schedule.microbatches > 1 and MICRO in sharding.owed:
                dtype = torch.promote_types(dtype, PRECISIONS[compiled.plan.accumulate])
            size = math.prod(note.shape) * dtype.itemsize
            if MICRO in sharding.axes:
                for number in range(schedule.microbatches):
                    yield schedule.placement[schedule.direction(number)][stage], size
            elif MICRO in sharding.owed:
                yield _BOTH, size


def _together(sizes: Sequence[int]) -> Iterator[int]:
    """The bytes of messages that carry pieces of some sizes."""
    return (sum(sizes[place] for place in places) for places in buckets(sizes, BUCKET))
