"""What a plan is predicted to do on a cluster: compile, summarize, simulate. No device and no weights are needed."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import replace

from meshwright.compiler.analysis.blocks import Folded, fold, unfolded
from meshwright.compiler.analysis.summarize import summarize
from meshwright.compiler.cluster.cluster import Cluster
from meshwright.compiler.cluster.presets import LOCAL, preset
from meshwright.compiler.diagnostics import MeshwrightError, error
from meshwright.compiler.graph.program import StepProgram
from meshwright.compiler.graph.rank_program import RankProgram
from meshwright.compiler.mesh import Mesh
from meshwright.compiler.passes.compile import compile_step
from meshwright.compiler.passes.facts import labels, repeated_blocks
from meshwright.compiler.passes.master_weights import as_policy
from meshwright.compiler.passes.pipeline import check_stages
from meshwright.compiler.passes.stages import block_order
from meshwright.compiler.passes.treated import treatments
from meshwright.compiler.plan import PIPE, Pipeline, Plan, Save, pattern_expression
from meshwright.compiler.prediction import Execution, Prediction
from meshwright.compiler.schedules.of_plan import schedule_of
from meshwright.compiler.timeline import simulate
from meshwright.compiler.timeline.planned import scheduled
from meshwright.compiler.timeline.stage import StagePricer
from meshwright.summaries import DEEPEST, depth_of, staged_summary_of, summary_of, turns


def predict(
    program: StepProgram,
    plan: Plan,
    cluster: Cluster,
    *,
    repeats: Mapping[str, int] | None = None,
    execution: Execution | None = None,
    spans: bool = False,
) -> Prediction:
    """Predict one step of ``program`` under a plan. ``repeats``: of a folded program, what its blocks stand for.

    Raises MeshwrightError E03xx where the plan cannot be followed, E0470 if it is for another number of ranks.
    """
    check_ranks(plan.mesh, cluster)
    rank_program = compile_step(as_policy(program, plan.numerics), plan)
    return predict_rank_program(rank_program, cluster, repeats=repeats, execution=execution, spans=spans)


def predict_rank_program(
    rank_program: RankProgram,
    cluster: Cluster,
    *,
    repeats: Mapping[str, int] | None = None,
    execution: Execution | None = None,
    spans: bool = False,
) -> Prediction:
    """Predict one step of a compiled program. Raises MeshwrightError E0470 if it is for another number of ranks."""
    check_ranks(rank_program.mesh, cluster)
    return simulate(summarize(rank_program, repeats), cluster, execution, spans=spans)


def predict_step(
    program: StepProgram,
    plan: Plan,
    cluster: Cluster,
    *,
    execution: Execution | None = None,
    spans: bool = False,
) -> Prediction:
    """Predict one whole step under a plan; of repeated blocks that the plan treats alike, two are compiled,
    unless weights are gathered further ahead than that shows.

    Raises MeshwrightError as :func:`predict`.
    """
    check_ranks(plan.mesh, cluster)
    if plan.prefetch > DEEPEST and plan.pipeline is None:
        return predict(program, plan, cluster, execution=execution, spans=spans)
    program = as_policy(program, plan.numerics)
    saves = treatments(program.micro, plan.recompute)
    places = turns(repeated_blocks(labels(program)), plan.recompute)
    alike = {block: (places.get(block), cuts) for block, cuts in _cuts(program, plan).items()}
    folded = fold(program, {**saves, **alike}) if plan.prefetch <= DEEPEST else unfolded(program)
    if plan.pipeline is not None:
        return _predict_pipeline(folded, plan, plan.pipeline, saves, cluster, execution or Execution(), spans)
    return simulate(summary_of(folded, plan, saves), cluster, execution, spans=spans)


def _predict_pipeline(
    folded: Folded,
    plan: Plan,
    pipeline: Pipeline,
    saves: Mapping[str, Save],
    cluster: Cluster,
    execution: Execution,
    spans: bool,
) -> Prediction:
    """Predict a step that is cut by depth: what its stages do is read off the program of a rank that had them all."""
    program = folded.source or folded.program
    check_stages(block_order(program.micro.module.graph), pipeline.first_blocks, plan)
    schedule = schedule_of(plan)
    inner = Mesh(tuple(axis for axis in plan.mesh.axes if axis[0] != PIPE))
    summary = staged_summary_of(folded, replace(plan, mesh=inner, pipeline=None), saves, schedule.apart)
    pricer = StagePricer(summary, cluster, execution)
    return scheduled(pricer, depth_of(folded, summary), plan.mesh, pipeline, schedule, spans=spans)


def _cuts(program: StepProgram, plan: Plan) -> dict[str, Hashable]:
    """By repeated block: which entries of the plan say how its parameters are cut."""
    patterns = [pattern_expression(entry.pattern) for entry in plan.parameters]
    blocks = {name for names in repeated_blocks(labels(program)).values() for name in names}
    found: dict[str, list[tuple[str, int]]] = {block: [] for block in blocks}
    for parameter in program.parameters:
        parts = parameter.name.split(".")
        block = next((b for n in range(1, len(parts)) if (b := ".".join(parts[:n])) in blocks), None)
        if block is not None:
            names = (parameter.name, *parameter.aliases)
            entry = next((i for i, p in enumerate(patterns) if any(p.fullmatch(n) for n in names)), -1)
            found[block].append((parameter.name.removeprefix(block), entry))
    return {block: tuple(sorted(entries)) for block, entries in found.items()}


def check_ranks(mesh: Mesh, cluster: Cluster) -> None:
    """Raises MeshwrightError E0470 if the mesh has another number of ranks than the cluster has devices."""
    if mesh.ranks == cluster.ranks:
        return
    named = _named_like(cluster, mesh.ranks)
    other = f"give --cluster {named}" if named else f"give a cluster file with {mesh.ranks} devices"
    raise error(
        "E0470",
        f"the plan is for {mesh.ranks} ranks ({mesh}), the cluster '{cluster.name}' has {cluster.ranks} devices",
        action=f"{other}, or a plan whose axes multiply to {cluster.ranks}",
    )


def _named_like(cluster: Cluster, ranks: int) -> str | None:
    """The preset of the same devices with so many of them, if there is one."""
    device = cluster.name if cluster.name == LOCAL else cluster.name.rpartition("x")[0]
    name = f"{device}x{ranks}"
    try:
        return name if device and preset(name) is not None else None
    except MeshwrightError:
        return None
