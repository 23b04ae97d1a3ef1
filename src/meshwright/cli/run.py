"""``meshwright run``"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from meshwright.job import RunOptions


def run_command(
    folder: Annotated[Path, typer.Argument(help="The artefact folder that 'meshwright compile' wrote.")],
    ranks: Annotated[int | None, typer.Option(help="The number of ranks to start. Default: as compiled.")] = None,
    steps: Annotated[int | None, typer.Option(help="Train until so many steps are done.")] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the newest checkpoint (see --resume-from).")
    ] = False,
    resume_from: Annotated[Path | None, typer.Option(help="A checkpoint, or a folder of checkpoints.")] = None,
    data: Annotated[
        str | None,
        typer.Option(help="A file instead of the program's own; or bytes:FILE, tokens:FILE:uint16, random."),
    ] = None,
    weights: Annotated[Path | None, typer.Option(help="A .safetensors file or folder to begin with.")] = None,
    seed: Annotated[
        int | None,
        typer.Option(min=-(2**63), max=2**63 - 1, help="The seed of weights, data order and dropout."),
    ] = None,
    checkpoints: Annotated[Path | None, typer.Option(help="Where checkpoints go. Default: FOLDER/checkpoints.")] = None,
    checkpoint_every: Annotated[
        int | None, typer.Option(min=0, help="Save every so many steps; always at the end.")
    ] = None,
    keep: Annotated[int, typer.Option(min=0, help="Keep so many of the newest checkpoints; 0: all.")] = 3,
    metrics: Annotated[Path | None, typer.Option(help="Where metrics go. Default: FOLDER/metrics.jsonl.")] = None,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Begin anew; move what an earlier run left into FOLDER/earlier-1, -2, ...")
    ] = False,
) -> None:
    """Train. Starts the ranks on this machine, or is one of them when a launcher such as torchrun has started it."""
    from meshwright.compiler.diagnostics import error
    from meshwright.job import RunOptions, load_job
    from meshwright.runtime.launch import launch
    from meshwright.runtime.worker import run_worker

    if resume and resume_from is None:
        resume_from = checkpoints or folder / "checkpoints"
    if fresh and resume_from is not None:
        raise typer.BadParameter("--fresh begins anew, --resume goes on: give one of them")
    options = RunOptions(
        steps, seed, data, weights, resume_from, checkpoints, checkpoint_every, metrics, keep=keep, fresh=fresh
    )
    if "RANK" in os.environ or "SLURM_PROCID" in os.environ or "OMPI_COMM_WORLD_RANK" in os.environ:
        raise typer.Exit(run_worker(lambda: load_job(folder, options)))
    job = load_job(folder, options)  # so that what is wrong is told before any rank is started
    mesh = job.rank_program.mesh
    if ranks is not None and ranks != mesh.ranks:
        raise error(
            "E0601",
            f"{folder} was compiled for {mesh.ranks} ranks ({mesh}), not {ranks}",
            action=f"give --ranks {mesh.ranks}, or compile for {ranks}",
        )
    del job
    launch(mesh.ranks, "meshwright.cli", _arguments(folder, options))


def _arguments(folder: Path, options: RunOptions) -> list[str]:
    """The command line of a rank that is started."""
    given = {
        "--steps": options.steps,
        "--seed": options.seed,
        "--data": options.data,
        "--weights": options.weights,
        "--resume-from": options.resume,
        "--checkpoints": options.checkpoints,
        "--checkpoint-every": options.checkpoint_every,
        "--metrics": options.metrics,
        "--keep": options.keep,
    }
    words = [f"{name}={value}" for name, value in given.items() if value is not None]
    return ["run", str(folder), *words, *(["--fresh"] if options.fresh else [])]
