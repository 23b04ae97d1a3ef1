"""``meshwright calibrate``"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer


def calibrate_command(
    ranks: Annotated[
        int | None, typer.Option(min=1, help="The number of ranks to start. Default: a rank for each GPU or core.")
    ] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="The cluster file. Default: print it.")] = None,
) -> None:
    """Measure this machine's kernels and links, and write them as a cluster file. Takes about a minute. Under
    torchrun or another launcher, measures all its nodes."""
    from meshwright.calibration import calibrate_worker, check_output
    from meshwright.runtime.launch import cores, launch

    if "RANK" in os.environ or "SLURM_PROCID" in os.environ or "OMPI_COMM_WORLD_RANK" in os.environ:
        raise typer.Exit(calibrate_worker(output))
    check_output(output)
    if ranks is None:
        import torch

        ranks = torch.cuda.device_count() or cores()
    launch(ranks, "meshwright.cli", ["calibrate", *([f"--output={output}"] if output else [])])
