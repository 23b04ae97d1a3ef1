"""What the ranks of a pipeline hand to one another: between passes, between rounds of the update, and at its end.

The runtime sends by these functions, and the check that all ranks come to an end reads them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from functools import cache

import torch

from meshwright.compiler.graph.meeting import meeting_places
from meshwright.compiler.graph.pipeline_program import PipelineProgram, Stage
from meshwright.compiler.graph.program import Annotation, Value, annotation
from meshwright.compiler.graph.rank_program import LocalGraph
from meshwright.compiler.schedules.instructions import Program
from meshwright.compiler.schedules.lower import programs
from meshwright.compiler.schedules.rounds import in_rounds
from meshwright.compiler.schedules.table import Action, Rounds, Schedule

BUCKET = 1 << 26
"""Bytes up to which the outputs of stages that two ranks hold go at once, and for which there are buffers."""
Origin = tuple[int, str]
"""The stage and pass that make a value."""


def rank_programs(stages: Sequence[Stage], schedule: Schedule) -> tuple[Program, ...]:
    """What the ranks of every ``pipe`` coordinate do, message by message, in the order of a schedule. Raises
    :class:`~meshwright.compiler.schedules.simulate.Stuck` where microbatches meet and the schedule does not let them.
    """
    links = {
        (number, kind): tuple(
            {origin for (one, _), origin in stage.takes.items() if one == kind and origin[0] != number}
        )
        for number, stage in enumerate(stages)
        for kind in stage.passes
    }
    find = cache(lambda way, pipe: wanted(stages, schedule.placement[way], pipe))

    @cache
    def sizes(way: int, origin: Origin, target: int) -> tuple[int, int]:
        names = find(way, target)[origin]
        made_in = stages[origin[0]].passes[origin[1]]
        own = [s for s, rank in enumerate(schedule.placement[way]) if rank == target]
        readers = [graph for number in own for graph in stages[number].passes.values()]
        return sum(size_made((made_in,), n) for n in names), sum(size_read(readers, n) for n in names)

    def size(made: Action, target: int) -> tuple[int, int]:
        return sizes(schedule.direction(made.microbatch), (made.stage, made.kind), target)

    rounds = waiting_of(stages)
    return programs(schedule if rounds is None else in_rounds(schedule, rounds), size=size, links=links)


def waiting_of(stages: Sequence[Stage]) -> Rounds | None:
    """What passes wait for, where microbatches meet; None where they do not."""
    reads = {
        (number, kind): tuple(dict.fromkeys(o for (one, _), o in stage.takes.items() if one == kind))
        for number, stage in enumerate(stages)
        for kind in stage.passes
    }
    meets = {
        (number, kind): tuple(dict.fromkeys(stage.takes[kind, name] for name in met_in(graph)))
        for number, stage in enumerate(stages)
        for kind, graph in stage.passes.items()
        if meeting_places(graph.module.graph)
    }
    return Rounds(reads, meets) if meets else None


def met_in(graph: LocalGraph) -> Iterator[str]:
    """The values of other passes that microbatches add up or join at the beginning of a pass."""
    nodes = dict(zip(graph.module.graph.find_nodes(op="placeholder"), graph.signature.inputs, strict=True))
    for node in meeting_places(graph.module.graph):
        value = nodes[node.all_input_nodes[0]]
        if value.kind == "value":
            yield value.name


def wanted(stages: Sequence[Stage], place: Sequence[int], pipe: int) -> dict[Origin, list[str]]:
    """By the pass of other ranks that makes them: the values that a ``pipe`` coordinate reads, sorted. ``place``: the
    coordinate of each stage."""
    found: dict[Origin, set[str]] = {}
    for number, stage in enumerate(stages):
        if place[number] == pipe:
            for (_, name), origin in stage.takes.items():
                if place[origin[0]] != pipe:
                    found.setdefault(origin, set()).add(name)
    return {origin: sorted(names) for origin, names in found.items()}


def moves_after(program: PipelineProgram, at: int) -> dict[tuple[int, int], list[str]]:
    """By ``pipe`` coordinates: the values of a round of the update that go from one to another."""
    moves = dict[tuple[int, int], set[str]]()
    place = program.schedule.placement[0]
    for pipe in range(program.schedule.ranks):
        for stage in program.updated_by(pipe):
            for (_, name), (source, made_in) in program.stages[stage].hands_over.items():
                if made_in == at and place[source] != pipe:
                    moves.setdefault((place[source], pipe), set()).add(name)
    return {pair: sorted(names) for pair, names in sorted(moves.items())}


def copies_after(program: PipelineProgram) -> Iterator[tuple[str, int, str, int]]:
    """The new values of parameters that further copies get after the update, tied ones and those of stages that two
    ranks hold: name and ``pipe`` coordinate of the value, name and coordinate of the copy, which is another one. A rank
    that holds both a parameter and a further copy has one tensor for them."""
    outputs = (value for graph in program.update_graphs for value in graph.signature.outputs)
    changed = {value.name: value.name for value in outputs if value.kind == "parameter"}
    for copy, name in {**changed, **program.copies}.items():
        there = program.holders(Value("parameter", name))
        for target in program.holders(Value("parameter", copy)):
            if target != there[0] and (copy == name or target not in there):
                yield name, there[0], copy, target


def buckets(sizes: Sequence[int], most: int) -> Iterator[range]:
    """Which of several tensors go together: as many as have no more than ``most`` bytes, at least one."""
    first = total = 0
    for place, size in enumerate(sizes):
        if place > first and total + size > most:
            yield range(first, place)
            first, total = place, 0
        total += size
    if first < len(sizes):
        yield range(first, len(sizes))


Spec = tuple[tuple[int, ...], torch.dtype]


def specs(graph: LocalGraph) -> dict[Value, Spec]:
    """The local shapes and dtypes of the values of other graphs that come into this one."""
    nodes = graph.module.graph.find_nodes(op="placeholder")
    notes = ((v, annotation(node)) for v, node in zip(graph.signature.inputs, nodes, strict=True) if v.kind == "value")
    return {value: (tuple(note.shape), note.dtype or torch.float32) for value, note in notes}


def size_read(readers: Iterable[LocalGraph], name: str) -> int:
    """The bytes of a value that the first of these graphs that reads it expects."""
    value = Value("value", name)
    return _bytes(*specs(next(graph for graph in readers if value in graph.signature.inputs))[value])


def size_made(makers: Iterable[LocalGraph], name: str) -> int:
    """The bytes of a value that one of these graphs makes."""
    value = Value("value", name)
    note = output_note(next(graph for graph in makers if value in graph.signature.outputs), value)
    return _bytes(note.shape, note.dtype or torch.float32)


def output_note(graph: LocalGraph, value: Value) -> Annotation:
    """What is known of an output of a graph."""
    (output,) = graph.module.graph.find_nodes(op="output")
    return annotation(output.args[0][graph.signature.outputs.index(value)])


def _bytes(shape: Iterable[int], dtype: torch.dtype) -> int:
    return math.prod(shape) * dtype.itemsize
