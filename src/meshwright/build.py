"""From a source to an artefact: load, capture, plan, partition, write. What ``meshwright compile`` does."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeGuard

from meshwright.arguments import checked_precision
from meshwright.compiler.cluster.cluster import Cluster
from meshwright.compiler.cluster.presets import LOCAL
from meshwright.compiler.diagnostics import Diagnostic, MeshwrightError, error
from meshwright.compiler.emit.artefact import write_artefact
from meshwright.compiler.graph.pipeline_program import Compiled
from meshwright.compiler.graph.program import StepProgram
from meshwright.compiler.passes.pipeline import compile_plan
from meshwright.compiler.passes.presets import preset
from meshwright.compiler.passes.separability import check_fits
from meshwright.compiler.plan import Declaration, Plan, Precision
from meshwright.compiler.plan_file import PlanFile, check_made_for, read_plan_file
from meshwright.compiler.schedules.of_plan import alone
from meshwright.compiler.search.limits import Limits
from meshwright.compiler.separability_text import Separability, declarations
from meshwright.frontend.capture.fingerprint import hashes_of
from meshwright.frontend.pins import pinned_plan, section_pins
from meshwright.frontend.source import Source, load_source, source_without_weights
from meshwright.frontend.widen import widened
from meshwright.planning import AUTO, cluster_of, plan_program


@dataclass(frozen=True)
class Built:
    """A compiled step and the folder that it was written to."""

    rank_program: Compiled
    folder: Path
    warnings: tuple[Diagnostic, ...]
    notes: tuple[str, ...] = ()
    """What was decided that a preset leaves open."""


@dataclass(frozen=True)
class Decided:
    """A captured step and the plan for it."""

    source: Source
    program: StepProgram
    plan: Plan
    warnings: tuple[Diagnostic, ...] = ()
    file: PlanFile | None = None
    """Where the plan was read from."""
    notes: tuple[str, ...] = ()
    """What was decided that a preset leaves open."""

    @contextlib.contextmanager
    def located(self) -> Iterator[None]:
        """Faults of the plan are told with their place in its file."""
        try:
            yield
        except MeshwrightError as fault:
            raise MeshwrightError(*(self.file.located(d) if self.file else d for d in fault.diagnostics)) from None


def compile(
    source: str,
    plan: str | Path | Plan | None = None,
    *,
    ranks: int | None = None,
    overrides: Mapping[str, float] | None = None,
    output: str | Path | None = None,
    cluster: str | Path | Cluster | None = None,
    batch: int | None = None,
    precision: Precision | str | None = None,
    separability: Separability | None = None,
) -> Built:
    """Compile a ``.mw`` file or a factory (``package.module:factory``) and write the artefact folder ``output``
    (default: ``gpt-build`` for ``gpt.mw`` or ``package.gpt:factory``).

    ``plan`` is a preset (``fsdp=2,tp=2``), the path of a plan file, or a Plan. Without one, the file's
    ``parallel`` section counts, else everything is fully sharded over ``ranks``. ``plan="auto"`` lets the planner
    choose for ``cluster`` (``h100x8``, a cluster file, or a Cluster). ``overrides`` replace sizes and settings by
    name, ``batch`` the samples of the global batch, ``precision`` that of the source and of the plan;
    ``separability`` declares what couplings of samples mean (see :func:`meshwright.parallelize`), instead of source
    and plan.
    Raises MeshwrightError for what cannot be read, captured or cut.
    """
    decided = decide(
        source,
        plan,
        ranks=ranks,
        overrides=overrides,
        cluster=cluster,
        batch=batch,
        precision=precision,
        separability=separability,
    )
    loaded = decided.source
    with decided.located():
        rank_program = compile_plan(decided.program, _for_ranks(decided.plan, ranks))
    weights = {} if loaded.train.initial else loaded.weights()
    tensors = {"initial": weights} if weights else {}
    changing = loaded.schedule(decided.program.scalars, loaded.train.steps)
    if changing:
        tensors["schedule"] = changing
    folder = write_artefact(rank_program, output or folder_of(source), loaded.description, loaded.train, tensors)
    return Built(rank_program, folder, decided.warnings, decided.notes)


def decide(
    source: str,
    plan: str | Path | Plan | None = None,
    *,
    ranks: int | None = None,
    overrides: Mapping[str, float] | None = None,
    cluster: str | Path | Cluster | None = None,
    batch: int | None = None,
    precision: Precision | str | None = None,
    separability: Separability | None = None,
    meta: bool = False,
) -> Decided:
    """Load and capture a source and find the plan for it, which may be for another number of ranks.

    ``meta``: no weights are needed, so that a factory makes its model on the meta device, if it can. The other
    arguments and the faults are those of :func:`compile`.
    """
    declared = declarations(separability)
    loaded = source_without_weights(source, overrides) if meta else load_source(source, overrides)
    if batch is not None:
        loaded = widened(loaded, batch)
    own = loaded.precision
    file = read_plan_file(plan) if _is_file(plan) else None
    if precision is not None:
        loaded.precision = checked_precision(precision) or own
    elif file is not None and "precision" in file.toml.values:
        loaded.precision = file.plan.precision  # the plan decides what is computed in
    program = loaded.capture()
    warnings = list(loaded.warnings)
    notes: tuple[str, ...] = ()
    given = file.plan if file is not None else plan if isinstance(plan, Plan) else None
    check_fits(program, declared or (given.separability if given is not None else ()) or loaded.separability)
    if file is not None:
        warnings += _check_made_for(file, program, loaded, own)
        chosen = replace(file.plan, precision=loaded.precision)
    elif plan == AUTO:
        where = cluster_of(cluster or LOCAL, ranks)
        limits = Limits(pins=replace(section_pins(loaded), separability=declared or loaded.separability or None))
        chosen = plan_program(program, where, ranks=ranks, limits=limits, precision=loaded.precision).plan
    else:
        chosen = _plan(plan, loaded, program, ranks, declared)
        notes = () if isinstance(plan, Plan) else chosen.reasons
    place = file.toml.value("microbatches" if "microbatches" in file.toml.values else "pipeline") if file else None
    if plan != AUTO:
        warnings += alone(chosen, program.batch_size, place)
    chosen = replace(chosen, separability=declared or chosen.separability or loaded.separability)
    return Decided(loaded, program, chosen, tuple(warnings), file, notes)


def folder_of(source: str) -> str:
    """The folder that an artefact is written to by default, in the working folder."""
    name = Path(source).stem if source.endswith(".mw") else source.partition(":")[0].rpartition(".")[2]
    return f"{name}-build"


def _check_made_for(file: PlanFile, program: StepProgram, source: Source, own: Precision) -> list[Diagnostic]:
    """Whether the plan was made for this model: as the plan computes it, or in the source's own precision.

    A plan's precision may be edited, and its hash is then still that of the program before.
    """
    made = hashes_of(program)
    if file.plan.hashes.model not in ("", made.model) and source.precision != own:
        before = replace(source, precision=own).capture().fingerprint
        made = replace(made, model=before) if before == file.plan.hashes.model else made
    word = "model" if file.plan.hashes.model else "outline"
    return check_made_for(file.plan, made, *(file.toml.value("made_for", key) for key in (word, "torch")))


def _plan(
    plan: str | Path | Plan | None,
    source: Source,
    program: StepProgram,
    ranks: int | None,
    declared: tuple[Declaration, ...],
) -> Plan:
    """The plan that is given, that the source's ``parallel`` section asks for, or full sharding."""
    if isinstance(plan, Plan):
        return plan
    if plan is not None:
        return preset(str(plan), program, ranks, source.precision, declared, source.separability)
    pinned = pinned_plan(source, program)
    if pinned is None and ranks is None:
        raise error("E0324", "no plan and no number of ranks", action="give --plan, say fsdp=2,tp=2, or --ranks N")
    return pinned or preset("fsdp", program, ranks, source.precision)


def _for_ranks(plan: Plan, ranks: int | None) -> Plan:
    """The plan, if it is for that many ranks."""
    if ranks is not None and plan.mesh.ranks != ranks:
        message = f"the plan is for {plan.mesh.ranks} ranks ({plan.mesh}), not {ranks}"
        raise error("E0325", message, action=f"give --ranks {plan.mesh.ranks}, or change the mesh")
    return plan


def _is_file(plan: str | Path | Plan | None) -> TypeGuard[str | Path]:
    """Whether a plan is given as a file; any other text is a preset."""
    return isinstance(plan, Path) or (isinstance(plan, str) and (plan.endswith(".toml") or "/" in plan))
