"""The toy program as a job of real workers."""

from __future__ import annotations

from pathlib import Path

import torch

from meshwright.compiler.mesh import Mesh
from meshwright.runtime.checkpoint import CheckpointPolicy
from meshwright.runtime.feed import Rows
from meshwright.runtime.train import TrainConfig
from meshwright.runtime.worker import WorkerJob
from tests.unit.runtime import toy

Axes = tuple[tuple[str, int], ...]


class ToySource:
    """The toy's batches, by rows."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def rows(self, step: int) -> Rows:
        return lambda name, rows: toy.batch(step, self.dtype)[name][rows]


def job(
    variant: str,
    axes: Axes,
    *,
    steps: int,
    microbatches: int = 1,
    dtype: torch.dtype = torch.float64,
    folder: str = "",
    every: int = 0,
    resume: bool = False,
) -> WorkerJob:
    """A job that trains the toy and, with a ``folder``, saves and tells metrics there."""
    place = Path(folder)
    config = TrainConfig(
        steps=steps,
        checkpoints=CheckpointPolicy(place, every=every) if folder else None,
        resume=place if resume else None,
        metrics=place / "metrics.jsonl" if folder else None,
    )
    program = toy.program(Mesh(axes), variant, microbatches, dtype)
    return WorkerJob(program, toy.weights, ToySource(dtype), lambda step: {"0/lr": 0.1 / (step + 1)}, config)
