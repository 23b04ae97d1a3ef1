"""Cut a step by depth, and each stage over the other axes of the mesh."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from meshwright.compiler.diagnostics import error, suggestion
from meshwright.compiler.graph.pipeline_program import PIPE, PipelineProgram, Stage
from meshwright.compiler.graph.program import StepProgram
from meshwright.compiler.graph.rank_program import LocalGraph, RankProgram
from meshwright.compiler.mesh import Mesh
from meshwright.compiler.passes.compile import compile_step, finished
from meshwright.compiler.passes.pieces import ORDER, Piece, split
from meshwright.compiler.passes.stages import assign, block_order
from meshwright.compiler.passes.untie import original, untie
from meshwright.compiler.passes.update_stages import assign_update, rounds_of
from meshwright.compiler.plan import Plan
from meshwright.compiler.schedules.lower import programs
from meshwright.compiler.schedules.table import Schedule


def compile_pipeline(
    program: StepProgram, plan: Plan, first_blocks: Sequence[str], schedule: Schedule, *, verify: bool = True
) -> PipelineProgram:
    """The programs of a pipeline. ``plan`` has the mesh with the axis ``pipe``; ``first_blocks`` are the blocks that
    stages after the first begin with.

    Raises MeshwrightError (E03xx) where the plan cannot be followed, E0502 for stages that the model or the schedule
    does not have.
    """
    _check(block_order(program.micro.module.graph), first_blocks, schedule)
    inner = Mesh(tuple(axis for axis in plan.mesh.axes if axis[0] != PIPE))
    tied = untie(program, first_blocks)
    whole = compile_step(tied, replace(plan, mesh=inner), verify=verify, raw=True)
    stages = _stages(whole, first_blocks, plan, verify)
    links = {
        (number, kind): tuple(
            {origin for (one, _), origin in stage.takes.items() if one == kind and origin[0] != number}
        )
        for number, stage in enumerate(stages)
        for kind in ORDER
    }
    copies = {p.name: original(p.name) for p in tied.parameters if original(p.name) != p.name}
    return PipelineProgram(whole, plan.mesh, stages, schedule, programs(schedule, links=links), copies)


def _check(order: Sequence[str], first_blocks: Sequence[str], schedule: Schedule) -> None:
    """Whether there are stages that begin so, as many as the schedule has."""
    inner = order[1:]
    for block in first_blocks:
        if block not in inner:
            raise error("E0502", f"no stage after the first can begin with '{block}'", action=suggestion(block, inner))
    if [b for b in inner if b in first_blocks] != list(first_blocks):
        raise error("E0502", "the stages' first blocks are not in the order of the model", action="sort them")
    if len(first_blocks) + 1 != schedule.stages:
        message = f"{len(first_blocks)} borders make {len(first_blocks) + 1} stages, the schedule has {schedule.stages}"
        raise error("E0502", message, action=f"give {schedule.stages - 1} first blocks")
    if len(schedule.placement) > 1:
        message = f"the schedule {schedule.name} sends microbatches in two directions, which is not run yet"
        raise error("E0502", message, action="take one that sends them in one, such as dualpipe-v")


def _stages(whole: RankProgram, first_blocks: Sequence[str], plan: Plan, verify: bool) -> tuple[Stage, ...]:
    micro, update = whole.micro, whole.update
    assigned = assign(micro.module.graph, _roles(micro), first_blocks)
    passes = split(micro, assigned)
    home = {name: found[0] for name, found in assigned.weights.items() if found}
    # what no stage reads is kept by the first one
    home |= {p.name: 0 for p in whole.program.parameters if p.name not in home}
    cut = assign_update(update.module.graph, _roles(update), home, assigned.stages)
    rounds = split(update, cut, rounds_of(cut))
    mesh = whole.mesh.with_micro(plan.microbatches)

    def made(piece: Piece, on: Mesh, prefetch: int) -> LocalGraph:
        return finished(piece.graph, on, prefetch=prefetch, meta=not verify)

    found = []
    for number in range(assigned.stages):
        mine = {str(kind): passes[number, kind] for kind in ORDER}
        late = [rounds[number, r] for r in rounds_of(cut)]
        names = tuple(name for name, stage in home.items() if stage == number)
        found.append(
            Stage(
                {kind: made(piece, mesh, plan.prefetch) for kind, piece in mine.items()},
                tuple(made(piece, whole.mesh, 0) for piece in late),
                names,
                tuple(s for s in whole.program.state if s.rpartition("/")[0] in names),
                tuple(v.name for p in mine.values() for v in p.graph.signature.inputs if v.kind == "buffer"),
                {(kind, value): origin for kind, piece in mine.items() for value, origin in piece.origin.items()},
                {(r, value): origin for r, piece in enumerate(late) for value, origin in piece.origin.items()},
            )
        )
    return tuple(found)


def _roles(local: LocalGraph) -> dict[Any, Any]:
    return dict(zip(local.module.graph.find_nodes(op="placeholder"), local.signature.inputs, strict=True))
