"""What a compiled program is made of: its graphs by the names of their files, and the rest as JSON; and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from meshwright.compiler.emit.manifest import shardings_from_json, shardings_to_json
from meshwright.compiler.graph.pipeline_program import Compiled, PipelineProgram, Stage
from meshwright.compiler.graph.program import StepProgram
from meshwright.compiler.graph.rank_program import LocalGraph, RankProgram
from meshwright.compiler.graph.stage_messages import rank_programs
from meshwright.compiler.plan import PIPE, Plan
from meshwright.compiler.schedules.of_plan import from_table

PASSES = {"F": "forward", "I": "backward_input", "W": "backward_weight"}
"""The names of a stage's passes; those of later rounds end in their number."""
TABLE = "schedule.txt"


def graphs_of(compiled: Compiled) -> dict[str, LocalGraph]:
    """By name: ``micro``, or ``stage-1/forward``."""
    if isinstance(compiled, RankProgram):
        return {"prologue": compiled.prologue, "micro": compiled.micro, "update": compiled.update}
    found = {"prologue": compiled.prologue}
    for number, stage in enumerate(compiled.stages):
        found |= {f"stage-{number}/{pass_name(kind)}": graph for kind, graph in stage.passes.items()}
        found |= {f"stage-{number}/update_{at}": graph for at, graph in enumerate(stage.update)}
    return found


def pass_name(kind: str) -> str:
    """The name of a pass: ``forward``, ``forward_1``."""
    return PASSES[kind[0]] + (f"_{kind[1:]}" if kind[1:] else "")


def table_of(compiled: PipelineProgram) -> str:
    """The table of the schedule, as a file for people that is read back."""
    schedule = compiled.schedule
    head = f"# {schedule.name}: what each of {schedule.ranks} ranks of '{PIPE}' does, a line for each\n"
    return head + str(schedule) + "\n"


def structure_to_json(compiled: Compiled) -> dict[str, Any]:
    """All of a compiled program but its graphs, its plan and its step for one device."""
    found = shardings_to_json(compiled)
    if isinstance(compiled, PipelineProgram):
        found["pipeline"] = {
            "stages": [_stage_to_json(stage) for stage in compiled.stages],
            "copies": dict(compiled.copies),
        }
    return found


def compiled_from(
    program: StepProgram, plan: Plan, graphs: Mapping[str, LocalGraph], manifest: Mapping[str, Any], table: str
) -> Compiled:
    """The program that :func:`graphs_of`, :func:`structure_to_json` and :func:`table_of` have taken apart."""
    shardings = shardings_from_json(manifest)
    if "pipeline" not in manifest:
        prologue, micro, update = (graphs[name] for name in ("prologue", "micro", "update"))
        return RankProgram(program, plan, plan.mesh, prologue, micro, update, **shardings)
    stages = []
    for number, data in enumerate(manifest["pipeline"]["stages"]):
        mine = {n.partition("/")[2]: g for n, g in graphs.items() if n.partition("/")[0] == f"stage-{number}"}
        rounds = [mine[f"update_{at}"] for at in range(data["rounds"])]
        stages.append(_stage_from_json(data, {kind: mine[pass_name(kind)] for kind in data["passes"]}, rounds))
    name = plan.pipeline.schedule if plan.pipeline is not None else ""
    schedule = from_table(name, table, plan.mesh.size(PIPE), len(stages), plan.microbatches)
    programs = rank_programs(stages, schedule)
    copies = manifest["pipeline"]["copies"]
    return PipelineProgram(
        program,
        plan,
        plan.mesh,
        graphs["prologue"],
        tuple(stages),
        schedule,
        programs,
        copies=copies,
        **shardings,
    )


def _stage_to_json(stage: Stage) -> dict[str, Any]:
    return {
        "parameters": stage.parameters,
        "state": stage.state,
        "passes": list(stage.passes),
        "rounds": len(stage.update),
        "takes": [[*key, *origin] for key, origin in stage.takes.items()],
        "hands_over": [[*key, *origin] for key, origin in stage.hands_over.items()],
    }


def _stage_from_json(data: Mapping[str, Any], passes: dict[str, LocalGraph], rounds: list[LocalGraph]) -> Stage:
    return Stage(
        passes,
        tuple(rounds),
        tuple(data["parameters"]),
        tuple(data["state"]),
        {(kind, value): (stage, made_in) for kind, value, stage, made_in in data["takes"]},
        {(at, value): (stage, made_in) for at, value, stage, made_in in data["hands_over"]},
    )
