"""Cut a step by depth, and each stage over the other axes of the mesh."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from meshwright.compiler import collector
from meshwright.compiler.diagnostics import MeshwrightError, Origin, error, suggestion
from meshwright.compiler.graph.meeting import joins, meeting_places
from meshwright.compiler.graph.pipeline_program import Compiled, PipelineProgram, Stage
from meshwright.compiler.graph.program import StepProgram, Value, annotation
from meshwright.compiler.graph.rank_program import LocalGraph, RankProgram
from meshwright.compiler.graph.stage_messages import rank_programs, waiting_of
from meshwright.compiler.mesh import Mesh
from meshwright.compiler.passes.compile import compile_step, finished
from meshwright.compiler.passes.master_weights import as_policy
from meshwright.compiler.passes.meeting_rounds import cut_at_meetings, meet_once
from meshwright.compiler.passes.pieces import ORDER, Piece, split
from meshwright.compiler.passes.stages import assign, block_order
from meshwright.compiler.passes.tell_numerics import tell_numerics
from meshwright.compiler.passes.untie import original, untie
from meshwright.compiler.passes.update_stages import assign_update, rounds_of
from meshwright.compiler.passes.verify_end import verify_end
from meshwright.compiler.passes.verify_relations import verify_relations
from meshwright.compiler.plan import PIPE, Plan
from meshwright.compiler.schedules.instructions import Program
from meshwright.compiler.schedules.of_plan import schedule_of
from meshwright.compiler.schedules.simulate import Stuck
from meshwright.compiler.schedules.table import Schedule


@collector.rarely()
def compile_plan(program: StepProgram, plan: Plan, *, verify: bool = True) -> Compiled:
    """What the ranks run: the program of all of them, or of each stage where the plan has a pipeline.

    With ``verify``, all of it is related to the step for one device at last (E0740 to E0743).
    Raises MeshwrightError (E03xx, E05xx) where the plan cannot be followed.
    """
    program = as_policy(program, plan.numerics)
    if plan.pipeline is None and PIPE not in plan.mesh.names:
        compiled: Compiled = compile_step(program, plan, verify=verify)
        verify_end(compiled)
        if verify:
            verify_relations(compiled)
    else:
        compiled = compile_pipeline(program, plan, verify=verify)
    if verify:
        tell_numerics(compiled)
    return compiled


def compile_pipeline(program: StepProgram, plan: Plan, *, verify: bool = True) -> PipelineProgram:
    """The programs of a pipeline.

    Raises MeshwrightError (E03xx, E0501 to E0507) where the plan cannot be followed.
    """
    pipeline = plan.pipeline
    if pipeline is None or PIPE not in plan.mesh.names:
        has, lacks = ("a pipeline", f"axis '{PIPE}'") if pipeline else (f"an axis '{PIPE}'", "pipeline")
        raise error("E0502", f"the plan has {has}, but no {lacks}", action="give both, or none of the two")
    first_blocks = pipeline.first_blocks
    check_stages(block_order(program.micro.module.graph), first_blocks, plan)
    schedule = schedule_of(plan)
    if len(schedule.placement) > 1 and schedule.microbatches < 2:
        message = f"the schedule {schedule.name} sends microbatches in two directions, and there is only one"
        raise error("E0502", message, action="cut the batch into more, or take a schedule such as dualpipe-v")
    inner = Mesh(tuple(axis for axis in plan.mesh.axes if axis[0] != PIPE))
    tied = untie(program, first_blocks)
    whole = compile_step(tied, replace(plan, mesh=inner, pipeline=None), verify=verify, raw=True)
    stages = _stages(whole, first_blocks, plan, verify, schedule.apart)
    made = _programs(stages, schedule)
    copies = {p.name: original(p.name) for p in tied.parameters if original(p.name) != p.name}
    compiled = PipelineProgram(
        program, plan, plan.mesh, whole.prologue, stages, schedule, made, whole.layouts, whole.state, copies
    )  # fmt: skip
    verify_end(compiled)
    if verify:
        verify_relations(compiled)
    return compiled


def check_stages(order: Sequence[str], first_blocks: Sequence[str], plan: Plan) -> None:
    """Whether there are stages that begin so. Raises MeshwrightError E0502 if not."""
    inner = order[1:]
    if len(order) < plan.mesh.size(PIPE):
        most = "leave the pipeline out" if len(order) < 2 else f"make '{PIPE}' at most {len(order)}"
        message = f"the model has {len(order) or 'no'} repeated blocks, which do not make {plan.mesh.size(PIPE)} stages"
        raise error("E0502", message, action=most)
    for block in first_blocks:
        if block == (order or [""])[0]:
            message = f"no stage after the first can begin with '{block}', which is the first block"
            raise error("E0502", message, action=f"begin the second stage with '{inner[0]}' or a later one")
        if block not in inner:
            message = f"no stage after the first can begin with '{block}', which is no repeated block of the model"
            raise error("E0502", message, action=suggestion(block, inner))
    ordered = [b for b in inner if b in first_blocks]
    if ordered != list(first_blocks):
        right = ", ".join(f"'{b}'" for b in ordered)
        at = next(i for i, (a, b) in enumerate(pairwise(first_blocks)) if inner.index(b) <= inner.index(a))
        here = f"'{first_blocks[at + 1]}' stands after '{first_blocks[at]}'"
        message = f"the stages' first blocks are not in the order of the model, each once: {here}"
        raise error("E0502", message, action=f"write {right}")


def _programs(stages: Sequence[Stage], schedule: Schedule) -> tuple[Program, ...]:
    """What ranks do. Raises E0766 where microbatches meet and the schedule does not let them: at the first line, and
    with all of them."""
    if len(schedule.placement) > 1 and waiting_of(stages) is not None:
        raise _refused(stages, f"under {schedule.name} they go two ways, through different ranks")
    try:
        return rank_programs(stages, schedule)
    except Stuck as stuck:
        why = f"under {schedule.name} some go back before all have come forward"
        raise _refused(stages, why, str(stuck)) from None


def _refused(stages: Sequence[Stage], why: str, stuck: str = "") -> MeshwrightError:
    lines: dict[Origin, bool] = {}
    meetings = [n for stage in stages for graph in stage.passes.values() for n in meeting_places(graph.module.graph)]
    for node in meetings:
        note = annotation(node)
        if note.phase == "forward":
            lines[note.origin] = lines.get(note.origin, False) or joins(node)
    first = next(iter(lines), annotation(meetings[0]).origin)
    message = f"microbatches meet here, since this is declared global, and {why}"
    also = tuple(f"they meet in {o.module or o.file}:{o.line} too: {o.text}" for o in lines if o != first)
    way = "take schedule=gpipe, or breadth-first with several stages on each rank"
    if not any(lines.values()):
        way += f", or declare {'them' if also else 'it'} per microbatch"
    way += ", or use micro=1"
    return error("E0766", message, first, way, (*also, *([stuck] if stuck else [])))


def _stages(
    whole: RankProgram, first_blocks: Sequence[str], plan: Plan, verify: bool, apart: bool
) -> tuple[Stage, ...]:
    micro, update = meet_once(whole.micro), whole.update
    assigned = assign(micro.module.graph, _roles(micro), first_blocks, apart=apart)
    order = cut_at_meetings(micro.module.graph, assigned)
    passes = split(micro, assigned, order)
    home = {name: found[0] for name, found in assigned.weights.items() if found}
    # what no stage reads is kept by the first one
    home |= {p.name: 0 for p in whole.program.parameters if p.name not in home}
    cut = assign_update(update.module.graph, _roles(update), home, assigned.stages)
    rounds = split(update, cut, rounds_of(cut))
    mesh = whole.mesh.with_micro(plan.microbatches)

    def made(piece: Piece, on: Mesh, prefetch: int) -> LocalGraph:
        offloaded = () if on is mesh else plan.offload
        return finished(piece.graph, on, prefetch=prefetch, on_host=offloaded, meta=not verify)

    found = []
    for number in range(assigned.stages):
        mine = {kind: passes[number, kind] for kind in order if kind in ORDER or _does_something(passes[number, kind])}
        late = [rounds[number, r] for r in rounds_of(cut)]
        names = tuple(name for name, stage in home.items() if stage == number)
        found.append(
            Stage(
                {kind: made(piece, mesh, plan.prefetch) for kind, piece in mine.items()},
                tuple(made(piece, whole.mesh, 0) for piece in late),
                names,
                tuple(s for s in whole.program.state if s.rpartition("/")[0] in names),
                {(kind, value): origin for kind, piece in mine.items() for value, origin in piece.origin.items()},
                {(r, value): origin for r, piece in enumerate(late) for value, origin in piece.origin.items()},
            )
        )
    return tuple(found)


def _does_something(piece: Piece) -> bool:
    return bool(piece.graph.signature.outputs)


def _roles(local: LocalGraph) -> Mapping[Any, Value]:
    return dict(zip(local.module.graph.find_nodes(op="placeholder"), local.signature.inputs, strict=True))
