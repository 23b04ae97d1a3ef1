"""What real workers of the tests run: the toy program as a job, or an artefact."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from meshwright.compiler.emit.artefact import read_artefact
from meshwright.compiler.mesh import Mesh
from meshwright.runtime.checkpoint import CheckpointPolicy
from meshwright.runtime.environment import place_of
from meshwright.runtime.executors import executor_for
from meshwright.runtime.feed import Rows, whole_batch
from meshwright.runtime.gather import full_state_dict
from meshwright.runtime.mail import ProcessMail
from meshwright.runtime.materialize import materialize
from meshwright.runtime.train import TrainConfig
from meshwright.runtime.worker import Session, WorkerJob, run_session
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


def train_artefact(
    folder: str, saved: dict[str, Tensor], batch: dict[str, Tensor], steps: int
) -> tuple[list[Any], dict[str, Tensor]]:
    """Train an artefact on this rank: loss and norm of every step, and the whole weights."""
    rank_program = read_artefact(folder).rank_program
    kept: list[Any] = []

    def body(session: Session) -> None:
        coordinates = rank_program.mesh.coordinates(session.place.rank)
        (holdings,) = materialize(rank_program, lambda name, spec: saved[name], [coordinates])
        executor = executor_for(rank_program, session.communicator, ProcessMail(session.communicator), holdings)
        feed = whole_batch(batch, rank_program.program)
        results = [executor.step(feed, step=step, seed=3) for step in range(steps)]
        kept.append(([(r.loss, r.norm) for r in results], full_state_dict(executor)))

    assert run_session(rank_program, place_of(), body) == 0
    result: tuple[list[Any], dict[str, Tensor]] = kept[0]
    return result
