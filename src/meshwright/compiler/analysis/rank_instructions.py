"""The programs of all ranks of what was compiled, from the first collective of a step to the last: prologue, passes and
their messages, loss, update, norm. The executors of the runtime do just this."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial

import torch

from meshwright.compiler.analysis.calls import Event, asked_by
from meshwright.compiler.analysis.graph_steps import Steps, steps_after_meetings, steps_from, steps_in_rounds, steps_of
from meshwright.compiler.analysis.inplace import order_of
from meshwright.compiler.analysis.rank_writer import RankWriter
from meshwright.compiler.analysis.two_holders import put_together
from meshwright.compiler.analysis.update_instructions import update
from meshwright.compiler.graph import collectives
from meshwright.compiler.graph.paying import paid
from meshwright.compiler.graph.pipeline_program import Compiled, PipelineProgram
from meshwright.compiler.graph.rank_program import LocalGraph
from meshwright.compiler.graph.stage_messages import output_note
from meshwright.compiler.graph.trial import tensor
from meshwright.compiler.mesh import Mesh
from meshwright.compiler.plan import PIPE
from meshwright.compiler.schedules.instructions import Compute, Program
from meshwright.compiler.schedules.lower import UPDATE
from meshwright.compiler.schedules.symmetry import RankPrograms
from meshwright.compiler.schedules.table import parse_rows

PROLOGUE, LOSS, NORM = "prologue", "loss", "norm"


def rank_instructions(compiled: Compiled, *, finite: bool = True) -> RankPrograms:
    """The programs of all ranks, in a step whose loss is finite or not: then they also find out whose part is not."""
    mesh = compiled.mesh.with_micro(compiled.plan.microbatches)
    if isinstance(compiled, PipelineProgram):
        return RankPrograms(compiled.mesh, (PIPE,), tuple(_of_pipe(compiled, mesh, finite)))
    writer = RankWriter(0, 1)
    writer.run(steps_of(compiled.prologue, mesh), PROLOGUE, (), (PROLOGUE,))
    made = tuple(f"microbatch {number}" for number in range(compiled.plan.microbatches))
    _microbatches(writer, compiled.micro, mesh, made)
    writer.run(steps_from(_paid_loss(compiled.micro, compiled.mesh)), LOSS, made)
    if not finite:
        _find_guilty(writer, compiled.micro, compiled.mesh)
    writer.run(steps_of(compiled.update, mesh, order_of(compiled.update)), UPDATE, made)
    return RankPrograms(compiled.mesh, (), (tuple(writer.program),))


def _microbatches(writer: RankWriter, micro: LocalGraph, mesh: Mesh, made: Sequence[str]) -> None:
    """All microbatches, which go together from one of their meetings to the next; see :mod:`meeting`."""
    rounds, meetings = steps_in_rounds(micro, mesh)
    needs = PROLOGUE
    for number, steps in enumerate(rounds):
        there = made if number == len(meetings) else tuple(f"{name} at meeting {number}" for name in made)
        for name, gives in zip(made, there, strict=True):
            writer.run(steps, name, (needs,), (gives,))
        if number < len(meetings):
            needs = f"what meeting {number} has made"
            writer.run(meetings[number], f"meeting {number}", there, (needs,))


def _of_pipe(compiled: PipelineProgram, mesh: Mesh, finite: bool) -> Iterator[Program]:
    """The program of every ``pipe`` coordinate."""
    prologue = steps_of(compiled.prologue, mesh)
    passes = {
        (number, kind): steps_after_meetings(graph, mesh)
        for number, stage in enumerate(compiled.stages)
        for kind, graph in stage.passes.items()
    }
    rounds = [[steps_of(g, mesh, order_of(g)) for g in stage.update] for stage in compiled.stages]
    outputs = [value for graph in compiled.update_graphs for value in graph.signature.outputs]
    for pipe, program in enumerate(compiled.programs):
        writer = RankWriter(pipe, len(compiled.programs))
        writer.run(prologue, PROLOGUE, (), (PROLOGUE,))
        needs: tuple[str, ...] = ()
        met: set[tuple[int, str]] = set()
        for instruction in program:
            if not isinstance(instruction, Compute):
                writer.program.append(instruction)
            elif instruction.name == UPDATE:
                needs = instruction.needs
            else:
                _passes(writer, instruction, passes, met)
        needs += put_together(writer, compiled, needs)
        own = _maker_of_loss(compiled, pipe)
        events = _paid_loss(own, compiled.mesh) if own is not None else ()
        writer.run(steps_from(events), f"{LOSS} of the stage", needs, (LOSS,))
        writer.run(steps_from(_over_pipe(mesh)), f"{LOSS} of all stages", (LOSS,))
        if not finite:
            _find_guilty(writer, own, compiled.mesh)
        made = update(writer, compiled, rounds, needs)
        if any(value.kind == "norm" for value in outputs):
            writer.run(steps_from(_over_pipe(mesh)), NORM, made)
        yield tuple(writer.program)


def _passes(
    writer: RankWriter,
    instruction: Compute,
    passes: Mapping[tuple[int, str], tuple[Steps, Steps]],
    met: set[tuple[int, str]],
) -> None:
    """The passes that an instruction stands for, one after the other; before the first microbatch of a pass the
    meetings that it begins with. ``met``: the passes before which microbatches have met."""
    ((step,),) = parse_rows(instruction.name)
    runs = [one for action in step for one in action.passes]
    for number, action in enumerate(runs):
        needs = (PROLOGUE, *instruction.needs) if not number else ()
        gives = instruction.gives if number == len(runs) - 1 else ()
        meetings, own = passes[action.stage, action.kind]
        if meetings.steps and (action.stage, action.kind) not in met:
            met.add((action.stage, action.kind))
            writer.run(meetings, f"meeting before {action.stage}{action.kind}", needs)
        writer.run(own, str(action), needs, gives)


def _maker_of_loss(compiled: PipelineProgram, pipe: int) -> LocalGraph | None:
    """The pass of a ``pipe`` coordinate that makes the loss, if there is one."""
    graphs = [graph for stage in compiled.held_by(pipe) for graph in compiled.stages[stage].passes.values()]
    return next((graph for graph in graphs if any(value.kind == LOSS for value in graph.outputs)), None)


def _paid_loss(graph: LocalGraph, devices: Mesh) -> tuple[Event, ...]:
    """How a rank's part of the loss becomes that of all: what it owes over axes of the device mesh is paid."""
    value, sharding = next((v, s) for v, s in graph.outputs.items() if v.kind == LOSS)
    note = output_note(graph, value)
    x = tensor(tuple(note.shape), note.dtype or torch.float32, meta=True)
    return asked_by(lambda: paid(x, sharding, devices), devices)


def _find_guilty(writer: RankWriter, graph: LocalGraph | None, devices: Mesh) -> None:
    """How all ranks learn whose part of the loss, which ``graph`` makes, is not finite."""
    owed = next((s.owed for v, s in graph.outputs.items() if v.kind == LOSS), frozenset()) if graph else frozenset()
    x = tensor((devices.ranks,), torch.float32, meta=True)
    for where, among in (("here", owed), ("in all stages", {PIPE})):
        if axes := tuple(axis for axis in devices.names if axis in among):
            events = asked_by(partial(collectives.all_reduce, x, axes, "max"), devices)
            writer.run(steps_from(events), f"whose loss is not finite {where}")


def _over_pipe(mesh: Mesh) -> tuple[Event, ...]:
    """A number that is added up over the stages."""
    return asked_by(lambda: collectives.all_reduce(tensor((), torch.float64, meta=True), (PIPE,), "sum"), mesh)
