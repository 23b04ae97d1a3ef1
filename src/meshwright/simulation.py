"""From an artefact, or a source and a plan, to the prediction of a step. What ``meshwright simulate`` does.

Nothing is run: weights stay on the meta device, and the cluster need not exist.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from meshwright.build import decide
from meshwright.compiler.cluster.cluster import Cluster
from meshwright.compiler.cluster.cluster_file import read_cluster
from meshwright.compiler.cluster.presets import LOCAL
from meshwright.compiler.diagnostics import Diagnostic, error, suggestion
from meshwright.compiler.emit.artefact import read_artefact
from meshwright.compiler.graph.pipeline_program import PipelineProgram
from meshwright.compiler.graph.program import StepProgram
from meshwright.compiler.passes.verify_shapes import lay_out
from meshwright.compiler.plan import Plan, Precision
from meshwright.compiler.prediction import Execution, Prediction
from meshwright.compiler.separability_text import Separability
from meshwright.compiler.timeline import FUSIONS
from meshwright.planning import AUTO, cluster_of
from meshwright.prediction_of import check_ranks, predict_rank_program, predict_step


@dataclass(frozen=True)
class Simulated:
    """What was predicted, of what, and where."""

    place: str
    """The source, for people."""
    program: StepProgram
    plan: Plan
    cluster: Cluster
    execution: Execution
    prediction: Prediction
    warnings: tuple[Diagnostic, ...] = ()
    notes: tuple[str, ...] = ()
    """What was decided that a preset leaves open."""


def simulate(
    source: str,
    plan: str | Path | Plan | None = None,
    cluster: str | Path | Cluster = LOCAL,
    *,
    overrides: Mapping[str, float] | None = None,
    batch: int | None = None,
    precision: Precision | str | None = None,
    separability: Separability | None = None,
    fusion: str = "none",
    spans: bool = False,
) -> Simulated:
    """Predict a step of an artefact folder, or of a ``.mw`` file or factory under a plan.

    ``plan``, ``overrides``, ``batch``, ``precision``, ``separability`` are those of :func:`meshwright.build.compile`;
    an artefact has its own. ``cluster`` is a preset (``h100x64``), a file or a Cluster; ``local`` takes as many ranks
    as the plan has, and without one as many as it has cores. Raises MeshwrightError: E0470 if plan and cluster have
    different numbers of ranks, E0471 for an unknown ``fusion``, E0472 for an artefact with a plan, overrides or their
    likes, and what reading, capturing and cutting raise.
    """
    if fusion not in FUSIONS:
        raise error("E0471", f"unknown fusion '{fusion}'", action=suggestion(fusion, FUSIONS))
    execution = Execution(fusion)
    where = cluster if isinstance(cluster, Cluster) or _is_local(cluster) else read_cluster(cluster)
    if Path(source).is_dir():
        others = {
            "a plan": plan,
            "other sizes": overrides,
            "another batch": batch,
            "another precision": precision,
            "a meaning of its couplings": separability,
        }
        for given in (name for name, value in others.items() if value):
            message = f"'{source}' is compiled already, so {given} cannot be given"
            raise error("E0472", message, action="give the source (a .mw file or package.module:factory) instead")
        artefact = read_artefact(source)
        rank_program = artefact.rank_program
        where = _for(rank_program.plan, where)
        if isinstance(rank_program, PipelineProgram):
            program = rank_program.program
            prediction = predict_step(program, rank_program.plan, where, execution=execution, spans=spans)
        else:
            lay_out(rank_program)
            prediction = predict_rank_program(rank_program, where, execution=execution, spans=spans)
        return Simulated(
            artefact.source.place,
            rank_program.program,
            rank_program.plan,
            where,
            execution,
            prediction,
            tuple(artefact.warnings),
        )
    if plan == AUTO:
        where = cluster_of(where)
    needed = plan is None or plan == AUTO or _is_open(plan)  # else other ranks are told by the plan's own number
    ranks = cluster_of(where).ranks if needed else None
    decided = decide(
        source,
        plan,
        ranks=ranks,
        overrides=overrides,
        cluster=where if plan == AUTO else None,
        batch=batch,
        precision=precision,
        separability=separability,
        meta=True,
    )
    where = _for(decided.plan, where)
    with decided.located():
        prediction = predict_step(decided.program, decided.plan, where, execution=execution, spans=spans)
    return Simulated(
        source, decided.program, decided.plan, where, execution, prediction, decided.warnings, decided.notes
    )  # fmt: skip


def _is_local(cluster: str | Path) -> bool:
    return str(cluster).strip().lower() == LOCAL


def _for(plan: Plan, cluster: Cluster | str | Path) -> Cluster:
    """The cluster, if it has as many devices as the plan has ranks."""
    found = cluster if isinstance(cluster, Cluster) else read_cluster(cluster, plan.mesh.ranks)
    check_ranks(plan.mesh, found)
    return found


def _is_open(plan: str | Path | Plan) -> bool:
    """Whether a preset leaves a size to the number of ranks."""
    words = re.split("[,*]", plan) if isinstance(plan, str) else []
    return any(re.fullmatch(r"\s*(pp|ddp|zero[123]|fsdp|tp)\s*", word) for word in words)
