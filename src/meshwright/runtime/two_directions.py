"""Where microbatches go in two directions, two ranks hold a stage: what both have of its outputs is put together.

The rank of the first direction updates the stage. It gets the gradients of the other one and adds them to its own.
Buffers that are reduced over microbatches both ranks get.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest

import torch
from torch import Tensor

from meshwright.compiler.graph.pipeline_program import PipelineProgram
from meshwright.compiler.graph.program import Value
from meshwright.compiler.graph.stage_messages import BUCKET, buckets
from meshwright.runtime.accumulate import Accumulator
from meshwright.runtime.mail import Mail, Parcel
from meshwright.runtime.mailroom import Mailroom


@dataclass(frozen=True)
class Piece:
    """A part of an output: the total, or what the microbatch ``at`` has given."""

    value: Value
    at: int
    tensor: Tensor
    """Of what comes from another rank: one that is like it."""


def put_together(
    program: PipelineProgram, pipe: int, accumulators: dict[Value, Accumulator], mail: Mail, room: Mailroom
) -> None:
    """Give the outputs of stages that two ranks hold to the one that updates them.

    ``accumulators`` are those of the rank at the coordinate ``pipe``. It keeps what belongs to stages that it updates,
    buffers, and its part of the loss.
    """
    shared: dict[tuple[int, int], list[int]] = {}
    for stage in range(len(program.stages)):
        holders = program.holders_of(stage)
        if len(holders) == 2 and pipe in holders:
            shared.setdefault((min(holders), max(holders)), []).append(stage)
    microbatches = program.schedule.microbatches
    for pair, stages in sorted(shared.items()):  # one order everywhere, so that no two ranks wait for one another
        (other,) = {*pair} - {pipe}
        there = room.rank_of(other)
        outputs = {s: [v for v in _outputs(program, s) if accumulators[v].adds_up] for s in stages}
        buffers = [v for s in stages for v in outputs[s] if v.kind == "buffer"]
        exchange(buffers, buffers, accumulators, microbatches, there, mail)
        mine = set(program.updated_by(pipe))
        gets = [v for s in stages for v in outputs[s] if v.kind in ("gradient", "result") and s in mine]
        gives = [v for s in stages for v in outputs[s] if v.kind in ("gradient", "result") and s not in mine]
        exchange(gives, gets, accumulators, microbatches, there, mail)
        for value in gives:
            del accumulators[value]


def exchange(
    gives: Sequence[Value],
    gets: Sequence[Value],
    accumulators: Mapping[Value, Accumulator],
    microbatches: int,
    rank: int,
    mail: Mail,
) -> None:
    """Send what there is of some outputs to another rank, and add to others what comes from there."""
    leaving = [Piece(v, at, t) for v in gives for at, t in accumulators[v].pieces().items()]
    coming = []
    for value in gets:
        own = accumulators[value].pieces()
        like = next(iter(own.values()))
        missing = [i for i in range(microbatches) if i not in own]
        coming += [Piece(value, at, like) for at in (missing if accumulators[value].collects else own)]
    for number, (sent, received) in enumerate(zip_longest(_buckets(leaving), _buckets(coming), fillvalue=())):
        label = f"what both directions have made, part {number}"
        buffers = [torch.empty_like(p.tensor, memory_format=torch.contiguous_format) for p in received]
        sends = [Parcel(rank, label, [p.tensor.contiguous() for p in sent])] if sent else []
        receives = [Parcel(rank, label, buffers)] if received else []
        for pending in mail.begin(sends, receives):
            pending.wait()
        for piece, tensor in zip(received, buffers, strict=True):
            accumulators[piece.value].put(piece.at, tensor)


def _outputs(program: PipelineProgram, stage: int) -> Iterator[Value]:
    for graph in program.stages[stage].passes.values():
        yield from (value for value in graph.signature.outputs if value.kind != "value")


def _buckets(pieces: Sequence[Piece]) -> Iterator[tuple[Piece, ...]]:
    """Pieces that go together. Both ranks make the same, for what they have of an output is alike."""
    for places in buckets([piece.tensor.nbytes for piece in pieces], BUCKET):
        yield tuple(pieces[place] for place in places)
