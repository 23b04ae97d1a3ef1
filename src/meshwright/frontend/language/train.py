"""The `train` section: optimizer, schedule, clipping, batch, precision, data, steps, seed, checkpoints."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from meshwright.compiler.diagnostics import Span, error, suggestion
from meshwright.compiler.plan import Precision
from meshwright.frontend.language import tree
from meshwright.frontend.language.choice import (
    OWN_SCHEDULES,
    Choice,
    check_optimizer,
    check_schedule,
    optimizers,
    read_choice,
    schedulers,
)
from meshwright.frontend.language.sizes import Dimensions, number

DTYPES = ("bf16", "fp16", "fp32", "fp64")
USES = {"compute": "compute", "weights": "weights", "reductions": "reduce"}
TOKEN_DTYPES = ("uint8", "uint16", "int32", "int64")


@dataclass(frozen=True)
class DataSection:
    """``kind`` is ``bytes``, ``tokens`` or ``random``; ``path`` is found from the folder of the `.mw` file.

    ``dtype`` is that of the stored tokens. Random tokens are below ``vocabulary``, which is the number of rows
    that the model looks its input up in (None if it does not).
    """

    kind: str
    path: str = ""
    dtype: str = "uint8"
    vocabulary: int | None = None
    span: Span | None = None


@dataclass(frozen=True)
class TrainSection:
    """How the model is trained. ``batch`` is the global batch; ``checkpoint_every`` None means at the end alone."""

    optimizer: Choice
    batch: int
    data: DataSection
    steps: int
    schedule: Choice = field(default_factory=lambda: Choice("constant"))
    clip: float | None = None
    precision: Precision = field(default_factory=Precision)
    seed: int = 0
    checkpoint_every: int | None = None

    def make_optimizer(self, module: nn.Module) -> Optimizer:
        """The optimizer over all parameters of ``module`` that want gradients."""
        parameters = [p for p in module.parameters() if p.requires_grad]
        try:
            return optimizers()[self.optimizer.name](parameters, **dict(self.optimizer.keywords))
        except (ValueError, TypeError, RuntimeError) as fault:
            reason = str(fault).splitlines()[0]
            place = self.optimizer.span
            message = f"'{self.optimizer.name}' does not accept these parameters: {reason}"
            raise error("E0219", message, place, "choose another optimizer") from None

    def make_scheduler(self, optimizer: Optimizer) -> LRScheduler:
        """The schedule, to be stepped once after every optimizer step."""
        if self.schedule.name in OWN_SCHEDULES:
            return LambdaLR(optimizer, self.learning_rate_factor)
        return schedulers()[self.schedule.name](optimizer, **dict(self.schedule.keywords))

    def learning_rate_factor(self, step: int) -> float:
        """What an own schedule multiplies the optimizer's rate with at ``step`` (from 0).

        Linear rise over ``warmup`` steps, then constant, or down to ``final`` at step ``steps`` along a line or
        half a cosine.
        """
        values: dict[str, Any] = {"warmup": 0, "steps": self.steps, "final": 0.0, **self.schedule.keywords}
        warmup, steps, final = (float(values[key]) for key in ("warmup", "steps", "final"))
        if step < warmup:
            return (step + 1) / warmup
        if self.schedule.name == "constant":
            return 1.0
        done = min(1.0, (step - warmup) / max(1.0, steps - warmup))
        shape = 1 - done if self.schedule.name == "linear" else 0.5 * (1 + math.cos(math.pi * done))
        return final + (1 - final) * shape


def read_train(
    section: tree.Train, dimensions: Dimensions, folder: Path, vocabulary: int | None, overrides: Mapping[str, float]
) -> TrainSection:
    """Check every setting of the section; ``overrides`` replace numbers by the setting's name."""
    settings = _settings(section)

    def whole(kind: str, least: int) -> int | None:
        if kind in overrides:
            return int(overrides[kind])
        if kind not in settings:
            return None
        expression = settings[kind].value
        assert expression is not None
        value = number(expression, dimensions.constants)
        if value != int(value) or not least <= value < 2**63:
            raise error("E0219", f"'{kind}' is {value:g}", expression.span, f"make it a whole number from {least} on")
        return int(value)

    optimizer = read_choice(settings["optimizer"], dimensions, "optimizer")
    check_optimizer(settings["optimizer"], optimizer)
    schedule = Choice("constant")
    if "learning rate" in settings:
        schedule = read_choice(settings["learning rate"], dimensions, "schedule")
        check_schedule(settings["learning rate"], schedule)
    batch = whole("batch", 1)
    steps = whole("steps", 1)
    scheduled = schedule.keywords.get("steps")
    if steps is None and isinstance(scheduled, int | float):
        steps = int(scheduled)
    if batch is None or steps is None:
        missing = "batch" if batch is None else "steps"
        raise error("E0220", f"'train' does not say '{missing}'", section.span, f"add a line '{missing} N'")
    return TrainSection(
        optimizer=optimizer,
        schedule=schedule,
        batch=batch,
        steps=steps,
        clip=_clip(settings.get("clip"), dimensions, overrides),
        precision=_precision(settings.get("precision")),
        data=_data(settings["data"], folder, vocabulary),
        seed=whole("seed", 0) or 0,
        checkpoint_every=whole("checkpoint every", 1),
    )


def _settings(section: tree.Train) -> dict[str, tree.Setting]:
    """Settings by kind, each once, the needed ones present."""
    settings: dict[str, tree.Setting] = {}
    for setting in section.settings:
        if setting.kind in settings:
            line = settings[setting.kind].span.line
            raise error("E0106", f"a second '{setting.kind}'", setting.span, f"keep this one or the one in line {line}")
        settings[setting.kind] = setting
    examples = {
        "loss": "cross_entropy(...)",
        "optimizer": "AdamW(lr = 3e-4)",
        "data": 'bytes("file")',
    }
    for kind, example in examples.items():
        if kind not in settings:
            raise error("E0220", f"'train' does not say '{kind}'", section.span, f"add a line '{kind} {example}'")
    return settings


def _clip(setting: tree.Setting | None, dimensions: Dimensions, overrides: Mapping[str, float]) -> float | None:
    if "clip" in overrides:
        return float(overrides["clip"])
    if setting is None or setting.value is None:
        return None
    value = float(number(setting.value, dimensions.constants))
    if value <= 0:
        raise error("E0219", f"'clip' is {value:g}", setting.value.span, "make it a number above zero")
    return value


def _precision(setting: tree.Setting | None) -> Precision:
    """``bf16 compute, fp32 weights, fp32 reductions``; what is not said is fp32."""
    if setting is None:
        return Precision()
    said: dict[str, str] = {}
    for dtype, use in setting.dtypes:
        if dtype.name not in DTYPES:
            raise error("E0218", f"unknown precision '{dtype.name}'", dtype.span, suggestion(dtype.name, DTYPES))
        if use.name not in USES:
            raise error("E0218", f"unknown use '{use.name}' of a precision", use.span, suggestion(use.name, USES))
        if USES[use.name] in said:
            raise error("E0106", f"the precision of '{use.name}' is said twice", use.span, "remove one of the two")
        said[USES[use.name]] = dtype.name
    return Precision(**said)


def _data(setting: tree.Setting, folder: Path, vocabulary: int | None) -> DataSection:
    """``bytes("file")``, ``tokens("file", uint16)`` or ``random``."""
    match setting.value:
        case tree.Name("random", span):
            return DataSection("random", dtype="int64", vocabulary=vocabulary, span=span)
        case tree.Call(tree.Word("bytes", span), (tree.Argument(tree.Text(path)),), _):
            if vocabulary is not None and vocabulary < 256:
                raise error(
                    "E0221",
                    f"bytes go up to 255, but the model looks them up in {vocabulary} rows",
                    span,
                    "make the axis of the table 256 or more",
                )
            return DataSection("bytes", str(folder / path), "uint8", vocabulary, span)
        case tree.Call(
            tree.Word("tokens", span), (tree.Argument(tree.Text(path)), tree.Argument(tree.Name(dtype, place))), _
        ):
            if dtype not in TOKEN_DTYPES:
                raise error("E0218", f"unknown dtype '{dtype}' of tokens", place, suggestion(dtype, TOKEN_DTYPES))
            return DataSection("tokens", str(folder / path), dtype, vocabulary, span)
        case tree.Name(name, span) | tree.Call(tree.Word(name, span), _, _) if name not in (
            "bytes",
            "tokens",
            "random",
        ):
            raise error("E0218", f"unknown data '{name}'", span, suggestion(name, ("bytes", "tokens", "random")))
    assert setting.value is not None
    raise error(
        "E0219", "this says no data", setting.value.span, 'write bytes("file"), tokens("file", uint16) or random'
    )
