"""Where a program comes from: a ``.mw`` file, or a factory ``package.module:factory`` that returns its parts.

Both become one :class:`Source`, which knows how to capture its step.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.compiler.analysis.blocks import Folded
from meshwright.compiler.analysis.stand_ins import COPIES
from meshwright.compiler.diagnostics import Diagnostic, MeshwrightError, error
from meshwright.compiler.emit.manifest import SourceDescription
from meshwright.compiler.graph.program import StepProgram
from meshwright.compiler.plan import Declaration, Precision
from meshwright.compiler.train_settings import DataSettings, InitialValue, TrainSettings
from meshwright.frontend.capture import capture
from meshwright.frontend.capture.shallow import capture_folded
from meshwright.frontend.language.build import declared_parameters
from meshwright.frontend.language.load import LoadedFile, load

Scheduler = torch.optim.lr_scheduler.LRScheduler


@dataclass
class Source:
    """A training step for one device before it is captured.

    ``batch`` is an example of the whole global batch in the form that ``capture`` takes.
    """

    description: SourceDescription
    model: nn.Module
    batch: Any
    optimizer: torch.optim.Optimizer
    loss: Callable[..., Any] | None = None
    clip: float | None = None
    precision: Precision = field(default_factory=Precision)
    separability: tuple[Declaration, ...] = ()
    """What couplings of samples mean, where the plan does not say it."""
    batch_dims: Mapping[str, int | None] | None = None
    scheduler: Scheduler | None = None
    train: TrainSettings = field(default_factory=TrainSettings)
    loaded: LoadedFile | None = None
    """The checked ``.mw`` file, with the pins of its ``parallel`` section."""
    warnings: tuple[Diagnostic, ...] = ()

    def capture(self) -> StepProgram:
        """Capture the step. Raises MeshwrightError at the user's line for what cannot be captured."""
        return capture(
            self.model,
            self.batch,
            optimizer=self.optimizer,
            loss=self.loss,
            clip=self.clip,
            batch_dims=self.batch_dims,
            precision=self.precision,
        )

    def capture_folded(self) -> Folded:
        """The step, folded; of a deep model the first layers are captured alone, where that is enough. Raises as
        :meth:`capture` does."""
        return capture_folded(
            self.model,
            self.batch,
            optimizer=self.optimizer,
            loss=self.loss,
            clip=self.clip,
            batch_dims=self.batch_dims,
            precision=self.precision,
            copies=COPIES,
        )

    def weights(self) -> dict[str, Tensor]:
        """The first values of parameters and buffers; empty for a model without any (on the meta device)."""
        tensors = {**dict(self.model.named_parameters()), **dict(self.model.named_buffers())}
        return {} if any(t.is_meta for t in tensors.values()) else {n: t.detach() for n, t in tensors.items()}

    def schedule(self, scalars: Mapping[str, float], steps: int) -> dict[str, Tensor]:
        """The scalars that change (``0/lr``), one float64 per step. Steps the scheduler."""
        if self.scheduler is None:
            return {}
        tables: dict[str, list[float]] = {name: [] for name in scalars}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns when the optimizer has not been stepped, or beyond the end
            for _ in range(steps):
                for name, table in tables.items():
                    group, _, entry = name.partition("/")
                    table.append(float(self.optimizer.param_groups[int(group)][entry]))
                self.scheduler.step()
        changing = {name: table for name, table in tables.items() if len(set(table)) > 1}
        return {name: torch.tensor(table, dtype=torch.float64) for name, table in changing.items()}


def load_source(text: str, overrides: Mapping[str, float] | None = None) -> Source:
    """The source that ``text`` names: the path of a ``.mw`` file, or ``package.module:factory``.

    ``overrides`` are sizes and settings of the file, or keyword arguments of the factory. Raises MeshwrightError
    E0110 to E0112 for a factory that cannot be used.
    """
    if text.endswith(".mw"):
        return _from_file(load(text, overrides), dict(overrides or {}))
    named = factory_named(text)
    if named is None:
        action = "give a '.mw' file, or a factory as package.module:factory"
        raise error("E0110", f"'{text}' names no source", action=action)
    module, name = named
    from meshwright.frontend.factory import source_of_factory

    return source_of_factory(module, name, dict(overrides or {}))


def factory_named(text: str) -> tuple[str, str] | None:
    """The module and the function that ``package.module:factory`` names; None for another text. Raises MeshwrightError
    E0110 for a file in the place of a module."""
    module, colon, name = text.partition(":")
    if not colon or not module or not name.isidentifier():
        return None
    if module.endswith(".py") or "/" in module:
        # a module is named as in an import, from the folder where the command runs
        dotted = module.removesuffix(".py").removeprefix("./").strip("/").replace("/", ".")
        raise error("E0110", f"'{module}' is a file, not a module", action=f"write {dotted}:{name}")
    if not all(part.isidentifier() for part in module.split(".")):
        return None
    return module, name


def source_without_weights(text: str, overrides: Mapping[str, float] | None = None) -> Source:
    """The same source for those who need no weights: a factory makes its model on the meta device, if it can."""
    try:
        with torch.device("meta"):
            return load_source(text, overrides)
    except MeshwrightError as fault:
        if text.endswith(".mw") or fault.diagnostics[0].code != "E0111":
            raise
    return load_source(text, overrides)


def _from_file(loaded: LoadedFile, overrides: Mapping[str, float]) -> Source:
    train = loaded.train
    if train is None:
        loaded.loss_module("meta")  # says that the file has no train section
        raise AssertionError("a file without a train section has no loss")
    model = loaded.loss_module("meta")
    optimizer = train.make_optimizer(model)
    initial = {
        name: InitialValue(p.initial.kind, p.initial.arguments)
        for name, p in declared_parameters(loaded.checked.model).items()
    }
    data = train.data
    settings = TrainSettings(
        steps=train.steps,
        seed=train.seed,
        checkpoint_every=train.checkpoint_every,
        data=DataSettings(data.kind, data.path, data.dtype, data.vocabulary),  # type: ignore[arg-type]  # checked there
        initial=initial,
    )
    with open(loaded.path, encoding="utf-8") as file:
        text = file.read()
    return Source(
        description=SourceDescription("language", loaded.path, loaded.name, overrides, text),
        model=model,
        batch=loaded.example_batch("meta"),
        optimizer=optimizer,
        clip=train.clip,
        precision=train.precision,
        separability=loaded.parallel.separability if loaded.parallel is not None else (),
        scheduler=train.make_scheduler(optimizer),
        train=settings,
        loaded=loaded,
        warnings=loaded.warnings,
    )
