"""From a source to an artefact: load, capture, plan, partition, write. What ``meshwright compile`` does."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from meshwright.compiler.diagnostics import Diagnostic, error
from meshwright.compiler.emit.artefact import write_artefact
from meshwright.compiler.graph.program import StepProgram
from meshwright.compiler.graph.rank_program import RankProgram
from meshwright.compiler.passes.compile import compile_step
from meshwright.compiler.passes.presets import preset
from meshwright.compiler.plan import Plan
from meshwright.compiler.plan_file import check_made_for, read_plan
from meshwright.frontend.pins import pinned_plan
from meshwright.frontend.source import Source, load_source


@dataclass(frozen=True)
class Built:
    """A compiled step and the folder that it was written to."""

    rank_program: RankProgram
    folder: Path
    warnings: tuple[Diagnostic, ...]


def compile(
    source: str,
    plan: str | Path | Plan | None = None,
    *,
    ranks: int | None = None,
    overrides: Mapping[str, float] | None = None,
    output: str | Path = "build",
) -> Built:
    """Compile a ``.mw`` file or a factory (``package.module:factory``) and write the artefact folder ``output``.

    ``plan`` is a preset (``fsdp=2,tp=2``), the path of a plan file, or a Plan. Without one, the file's
    ``parallel`` section counts, else everything is fully sharded over ``ranks``. ``overrides`` replace sizes and
    settings by name.
    Raises MeshwrightError for what cannot be read, captured or cut.
    """
    loaded = load_source(source, overrides)
    program = loaded.capture()
    chosen, warnings = choose_plan(plan, loaded, program, ranks)
    rank_program = compile_step(program, chosen)
    weights = {} if loaded.train.initial else loaded.weights()
    tensors = {"initial": weights} if weights else {}
    changing = loaded.schedule(program.scalars, loaded.train.steps)
    if changing:
        tensors["schedule"] = changing
    folder = write_artefact(rank_program, output, loaded.description, loaded.train, tensors)
    return Built(rank_program, folder, (*loaded.warnings, *warnings))


def choose_plan(
    plan: str | Path | Plan | None, source: Source, program: StepProgram, ranks: int | None
) -> tuple[Plan, list[Diagnostic]]:
    """The plan to compile for, and warnings about it.

    Raises MeshwrightError if it is for another model or other ranks.
    """
    warnings: list[Diagnostic] = []
    if plan is None:
        pinned = pinned_plan(source, program)
        if pinned is None and ranks is None:
            raise error("E0324", "no plan and no number of ranks", action="give --plan, say fsdp=2,tp=2, or --ranks N")
        chosen = pinned or preset("fsdp", program, ranks, source.precision)
    elif isinstance(plan, Plan):
        chosen = plan
    elif is_file(plan):
        chosen = read_plan(Path(plan))
        warnings = check_made_for(chosen, program.fingerprint, torch.__version__, str(plan))
        if chosen.precision != source.precision:
            said = ", ".join(f"{getattr(chosen.precision, use)} {use}" for use in ("compute", "weights", "reduce"))
            message = f"{plan} says {said}, which is not what the program computes in"
            warnings.append(
                Diagnostic("W0311", message, action="change the precision in the program's 'train' section")
            )
    else:
        chosen = preset(str(plan), program, ranks, source.precision)
    if ranks is not None and chosen.mesh.ranks != ranks:
        raise error(
            "E0325",
            f"the plan is for {chosen.mesh.ranks} ranks ({chosen.mesh}), not {ranks}",
            action=f"give --ranks {chosen.mesh.ranks}, or change the mesh",
        )
    return chosen, warnings


def is_file(plan: str | Path) -> bool:
    """Whether a plan is given as a file; else it is a preset."""
    return isinstance(plan, Path) or plan.endswith(".toml") or "/" in plan
