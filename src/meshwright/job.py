"""From an artefact to the job of a worker: weights, data, schedule, checkpoints. What ``meshwright run`` runs."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from meshwright.compiler.diagnostics import error
from meshwright.compiler.emit.artefact import Artefact, read_artefact
from meshwright.compiler.graph.program import StepProgram, TensorSpec
from meshwright.compiler.train_settings import DataSettings, TrainSettings
from meshwright.frontend.language.block import Initial
from meshwright.frontend.language.initial import draw
from meshwright.runtime.checkpoint import CheckpointPolicy
from meshwright.runtime.checkpoint_folder import find, read_record
from meshwright.runtime.data import CorpusSource, RandomSource, Source, bytes_of, tokens_of
from meshwright.runtime.materialize import Weights, from_safetensors
from meshwright.runtime.places import check_places, check_unused
from meshwright.runtime.train import Scalars, TrainConfig, check_same_run
from meshwright.runtime.worker import WorkerJob


@dataclass(frozen=True)
class RunOptions:
    """What the command line says about a run; None: as the artefact says."""

    steps: int | None = None
    seed: int | None = None
    data: str | None = None
    """``bytes:FILE``, ``tokens:FILE:DTYPE``, ``random``, or the path of a file of the kind that the program reads."""
    weights: Path | None = None
    """A ``.safetensors`` file or a folder of them, to begin with."""
    resume: Path | None = None
    checkpoints: Path | None = None
    """Where checkpoints go; None: ``checkpoints`` in the artefact."""
    checkpoint_every: int | None = None
    metrics: Path | None = None
    """Where metrics go; None: ``metrics.jsonl`` in the artefact."""
    keep: int = 3
    """How many checkpoints are kept, the newest; 0: all."""
    fresh: bool = False
    """Whether what an earlier run left is moved aside."""


def load_job(folder: Path, options: RunOptions, device: torch.device | str = "cpu") -> WorkerJob:
    """Read an artefact and all that its run needs. Raises MeshwrightError for what is missing or does not fit."""
    artefact = read_artefact(folder, device)
    settings = artefact.train
    program = artefact.rank_program.program
    seed = settings.seed if options.seed is None else options.seed
    steps = settings.steps if options.steps is None else options.steps
    if steps < 1:
        raise error("E0646", f"{steps} steps cannot be run", action="give --steps N with N of at least 1")
    every = settings.checkpoint_every if options.checkpoint_every is None else options.checkpoint_every
    data = data_settings(settings.data, options.data)
    source = data_source(data, program, seed)
    config = TrainConfig(
        steps=steps,
        seed=seed,
        checkpoints=CheckpointPolicy(options.checkpoints or folder / "checkpoints", every or 0, options.keep),
        resume=options.resume,
        metrics=options.metrics or folder / "metrics.jsonl",
        data=described(data),
        other_data=options.data is not None,
        fresh=options.fresh,
        notice=_notice(artefact, options),
    )
    check_run(config)
    return WorkerJob(
        rank_program=artefact.rank_program,
        weights=first_weights(artefact, seed, options.weights),
        source=source,
        scalars=schedule_of(artefact),
        config=config,
    )


def check_run(config: TrainConfig) -> None:
    """What can be told before any rank is started. Raises MeshwrightError E0620 to E0627."""
    if config.checkpoints is not None and config.metrics is not None:
        check_places(config.checkpoints.folder, config.metrics)
        if config.resume is None and not config.fresh:
            check_unused(config.checkpoints.folder, config.metrics)
    if config.resume is not None:
        check_same_run(read_record(find(config.resume)), config)


def described(data: DataSettings) -> str:
    """What is trained on, in words that stay the same where a file is moved and differ where it is another one."""
    if data.kind == "random":
        return "random data"
    path = Path(data.path)
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(1 << 20)
        file.seek(max(0, size - (1 << 20)))
        check = zlib.crc32(file.read(1 << 20), zlib.crc32(start))
    dtype = f" ({data.dtype})" if data.kind == "tokens" else ""
    return f"{data.kind}:{path.name}{dtype}, {size} bytes, checksum {check:08x}"


def _notice(artefact: Artefact, options: RunOptions) -> str:
    """A factory that names no data may be a mistake; a ``.mw`` file says ``data random`` itself."""
    if artefact.source.kind == "language" or artefact.train.data.kind != "random" or options.data is not None:
        return ""
    return "training on random data, since the factory gives none: see --data"


def first_weights(artefact: Artefact, seed: int, given: Path | None = None) -> Weights:
    """The weights to begin with: those given, those in the artefact, or those that its initial values say."""
    if given is not None:
        return from_safetensors(given)
    if "initial" in artefact.tensors:
        return from_safetensors(artefact.tensors["initial"])
    return drawn(artefact.train, seed)


def drawn(settings: TrainSettings, seed: int) -> Weights:
    """Each parameter drawn as the ``.mw`` file says: a function of the seed and its name alone."""

    def weights(name: str, spec: TensorSpec) -> Tensor:
        how = settings.initial[name]
        return draw(Initial(how.kind, how.arguments), name, spec.shape, seed)

    return weights


def schedule_of(artefact: Artefact) -> Scalars:
    """The scalars of each step; beyond the end of the schedule its last values hold."""
    constant = dict(artefact.rank_program.program.scalars)
    path = artefact.tensors.get("schedule")
    tables: Mapping[str, Tensor] = {}
    if path is not None:
        from safetensors.torch import load_file

        tables = load_file(path)

    def at(step: int) -> dict[str, float]:
        return {**constant, **{name: float(t[min(step, len(t) - 1)]) for name, t in tables.items()}}

    return at


def data_settings(settings: DataSettings, given: str | None) -> DataSettings:
    """The settings with the data that the command line gives. Raises E0647 for text that names none."""
    if given is None:
        return settings
    kind, _, rest = given.partition(":")
    if kind == "random" and not rest:
        return replace(settings, kind="random", path="")
    if kind == "bytes" and rest:
        return replace(settings, kind="bytes", path=rest)
    if kind == "tokens":
        path, _, dtype = rest.rpartition(":")
        if not path:
            raise error("E0647", f"'{given}' does not say the dtype of the tokens", action="write tokens:FILE:uint16")
        return replace(settings, kind="tokens", path=path, dtype=dtype)
    if settings.kind == "random":
        raise error(
            "E0647",
            f"the program trains on random data, so what is in '{given}' is not known",
            action=f"write bytes:{given} or tokens:{given}:uint16",
        )
    return replace(settings, path=given)


def data_source(settings: DataSettings, program: StepProgram, seed: int) -> Source:
    """Opens the data. Raises MeshwrightError E061x for a file that is missing or too short."""
    if settings.kind == "random":
        high = {} if settings.vocabulary is None else dict.fromkeys(program.batch, settings.vocabulary)
        return RandomSource(program, seed=seed, high=high)
    fields = settings.fields or dict.fromkeys(program.batch, 0)
    corpus = bytes_of(settings.path) if settings.kind == "bytes" else tokens_of(settings.path, settings.dtype)
    return CorpusSource(corpus, program, fields, seed=seed, vocabulary=settings.vocabulary)
