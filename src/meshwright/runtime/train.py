"""The training loop of one rank: read, step, report, save."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from meshwright.compiler.diagnostics import error
from meshwright.compiler.plan import PIPE
from meshwright.runtime import checkpoint
from meshwright.runtime.checkpoint import CheckpointPolicy
from meshwright.runtime.checkpoint_folder import Record
from meshwright.runtime.checkpoint_planner import Shards
from meshwright.runtime.data import Source, feed_of
from meshwright.runtime.measured import FILE as MEASURED
from meshwright.runtime.measured import measured_of, measured_rank, write_measured
from meshwright.runtime.metrics import Metrics, MetricsFile, memory_in_use
from meshwright.runtime.places import move_aside
from meshwright.runtime.progress import Reporter, reporter
from meshwright.runtime.step_executor import StepExecutor
from meshwright.runtime.together import together

Scalars = Callable[[int], Mapping[str, float]]
"""The scalars of a step (``{"0/lr": 3e-4}``), as :class:`meshwright.runtime.schedule.Schedule` gives them by ``at``."""


@dataclass(frozen=True)
class TrainConfig:
    """How long to train and what to leave behind. ``resume`` is a checkpoint or a folder of checkpoints."""

    steps: int
    seed: int = 0
    checkpoints: CheckpointPolicy | None = None
    resume: Path | None = None
    metrics: Path | None = None
    """The JSON lines of rank 0."""
    data: str = ""
    """What is trained on, in words, kept with each checkpoint; empty: not known."""
    other_data: bool = False
    """Whether going on with other data than the checkpoint's is wanted."""
    fresh: bool = False
    """Whether what an earlier run left in these places is moved aside first."""
    notice: str = ""
    """One line that is told at the start."""
    report_every: float = 2.0
    """Seconds between the lines of a run without a terminal."""


def train(
    executor: StepExecutor,
    source: Source,
    scalars: Scalars,
    config: TrainConfig,
    report: Reporter | None = None,
    base: int = 0,
) -> list[Metrics]:
    """Train until ``config.steps`` steps are done in all, and return what each step of this run told.

    What was measured goes beside the metrics (:mod:`meshwright.runtime.measured`); ``base`` are the bytes that were
    in use before there were weights.

    Data, random keys and scalars are functions of the step's number, so a resumed run goes on as if it had not stopped.
    """
    rank = executor.communicator.rank
    shards = shards_of(executor)
    first, seed = 0, config.seed
    if config.resume is not None:
        record = checkpoint.load(shards, config.resume)
        first = record.step
        check_same_run(record, config)
    elif config.fresh:
        checkpoints = config.checkpoints.folder if config.checkpoints is not None else None
        together(lambda: move_aside(checkpoints, config.metrics), on_rank_0=True)
    shown = report or reporter(first, config.steps, rank=rank, every=config.report_every)
    history: list[Metrics] = []
    stream = MetricsFile(config.metrics) if config.metrics is not None and rank == 0 else None
    try:
        with shown:
            if config.notice:
                shown.say(config.notice)
            if first >= config.steps:
                shown.say(f"all {config.steps} steps are done; give --steps to go on")
            elif first:
                shown.say(f"resumed after step {first}")
            for step in range(first, config.steps):
                told = _one_step(executor, source, scalars, step, seed)
                history.append(told)
                shown.step(told)
                if stream is not None:
                    stream.write(told)
                _save(shards, config, step + 1, seed, shown)
    finally:
        if stream is not None:
            stream.close()
    if config.metrics is not None and history:
        _tell_measured(executor, history, base, config.metrics.with_name(MEASURED))
    return history


def _tell_measured(executor: StepExecutor, history: list[Metrics], base: int, file: Path) -> None:
    """Rank 0 writes down what all ranks have measured."""
    rank, device = executor.communicator.rank, executor.device.type
    pipe = executor.rank_program.mesh.coordinates(rank).get(PIPE, 0)
    ranks = together(lambda: measured_rank(history, executor.holdings, base, device, rank, pipe))
    if rank == 0:
        write_measured(file, measured_of(history, ranks, device), executor.rank_program.plan.predicted)


def check_same_run(record: Record, config: TrainConfig) -> None:
    """To go on is to go on with the seed and the data of the checkpoint. Raises MeshwrightError E0624 or E0626."""
    if record.seed != config.seed:
        raise error(
            "E0624",
            f"the checkpoint was trained with the seed {record.seed}, not with this run's {config.seed}",
            action=f"use the seed {record.seed}",
        )
    if record.data and config.data and record.data != config.data and not config.other_data:
        raise error(
            "E0626",
            f"the checkpoint was trained on {record.data}, this run reads {config.data}",
            action="give the data of before with --data, or with --data those that you want to go on with",
        )


def shards_of(executor: StepExecutor) -> Shards:
    """What a checkpoint of this rank saves and loads."""
    coordinates = executor.rank_program.mesh.coordinates(executor.communicator.rank)
    return Shards(executor.rank_program, [(coordinates, executor.holdings)])


def _one_step(executor: StepExecutor, source: Source, scalars: Scalars, step: int, seed: int) -> Metrics:
    program = executor.rank_program.program
    values = scalars(step)
    began = time.perf_counter()
    result = executor.step(feed_of(source, step, program), step=step, seed=seed, scalars=values)
    seconds = time.perf_counter() - began
    memory, peak = memory_in_use(executor.device)
    rates = [v for name, v in values.items() if name.endswith("/lr")]
    return Metrics(
        step=step,
        loss=result.loss,
        norm=result.norm,
        lr=rates[0] if rates else None,
        tokens_per_second=tokens_of_batch(executor) / seconds,
        seconds=seconds,
        memory=memory,
        peak=peak,
    )


def tokens_of_batch(executor: StepExecutor) -> int:
    """Tokens of the global batch: the elements of its largest integer tensor, or its samples if it has none."""
    program = executor.rank_program.program
    sizes = [program.batch_size]
    for name, spec in program.batch.items():
        if not spec.dtype.is_floating_point and program.batch_dims[name] is not None and len(spec.shape) == 2:
            sizes.append(spec.shape[0] * spec.shape[1])
    return max(sizes)


def _save(shards: Shards, config: TrainConfig, done: int, seed: int, shown: Reporter) -> None:
    policy = config.checkpoints
    if policy is None:
        return
    if (policy.every and done % policy.every == 0) or (policy.at_end and done == config.steps):
        place = checkpoint.save(shards, policy.folder, step=done, seed=seed, keep=policy.keep, data=config.data)
        shown.say(f"saved {place}")
