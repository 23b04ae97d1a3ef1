"""A user's factory: a Python function that returns model, example batch, optimizer and, if it is apart, the loss.

It returns them as a tuple in this order, or as a dict or object with the fields of :data:`FIELDS`. Keyword
arguments come from ``--set``.
"""

from __future__ import annotations

import importlib
import math
import os
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from meshwright.compiler.diagnostics import MeshwrightError, Origin, error, nearest, suggestion
from meshwright.compiler.emit.manifest import SourceDescription
from meshwright.compiler.plan import Declaration, Precision
from meshwright.compiler.precision_text import parse_precision
from meshwright.compiler.separability_text import declarations
from meshwright.compiler.train_settings import DataSettings, TrainSettings
from meshwright.frontend.source import Source

FIELDS = {
    "model": "an nn.Module",
    "batch": "an example of the whole global batch",
    "optimizer": "a torch.optim optimizer over the model's parameters",
    "loss": "a function of (output, batch), or None if the model returns its loss",
    "clip": "the largest global gradient norm",
    "precision": 'a Precision, or its text, such as "bf16"',
    "separability": "what couplings of samples mean in microbatches: a meaning, or a dict of them",
    "batch_dims": "which dim of each batch tensor is the batch",
    "scheduler": "a torch.optim.lr_scheduler over the optimizer",
    "data": "a DataSettings, or a dict of its fields",
    "steps": "how many steps to train",
    "seed": "the seed of data order and dropout",
    "checkpoint_every": "after how many steps to save",
}
"""What a factory may return, by name."""

_ORDER = ("model", "batch", "optimizer", "loss")


@dataclass(frozen=True)
class Untrained:
    """What a factory returns that names no training step: a model, or any function of tensors, with a batch."""

    model: Callable[..., Any]
    batch: Any
    why: str
    """What there is no step for, told."""


def source_of_factory(module: str, name: str, keywords: Mapping[str, Any]) -> Source:
    """Import the factory, call it, and check what it returns. Raises MeshwrightError E0110 to E0112."""
    return _source(_returned(module, name, keywords), module, name, keywords)


def given_by_factory(module: str, name: str, keywords: Mapping[str, Any]) -> Source | Untrained:
    """What a factory returns that need not return more than a model and a batch.

    One that names an optimizer, a loss, or something unknown means a training step, which must be a whole one. Raises
    MeshwrightError E0110 to E0112.
    """
    returned = _returned(module, name, keywords)
    if _means_a_step(returned):
        return _source(returned, module, name, keywords)
    place = f"{module}:{name}"
    if isinstance(returned, tuple):
        model, batch = (*returned, None, None)[:2]
    elif isinstance(returned, Mapping):
        model, batch = returned.get("model"), returned.get("batch")
    else:
        model, batch = getattr(returned, "model", None), getattr(returned, "batch", None)
    if not callable(model) or batch is None:
        raise error("E0112", f"{place} returns no model with a batch", action="return (model, batch), at least")
    return Untrained(model, batch, f"{place} returns a model and a batch, no optimizer and no loss")


def _means_a_step(returned: Any) -> bool:
    """Whether what was returned names more than a model with its batch."""
    if isinstance(returned, tuple):
        return any(part is not None for part in returned[2:])
    if isinstance(returned, Mapping):
        unknown = any(key not in FIELDS for key in returned)
        return unknown or any(returned.get(field) is not None for field in _ORDER[2:])
    return any(getattr(returned, field, None) is not None for field in _ORDER[2:])


def _returned(module: str, name: str, keywords: Mapping[str, Any]) -> Any:
    """Call the factory. Raises MeshwrightError E0110 and E0111."""
    function = _find(module, name)
    try:
        return function(**keywords)
    except MeshwrightError:
        raise
    except (Exception, SystemExit) as fault:  # whatever the user's function raises is told, not thrown
        given = ", ".join(f"{key}={value}" for key, value in keywords.items())
        notes = (f"it was called with {given}, as --set says",) if given else ()
        action = "correct the factory" + (", or --set" if given else "")
        raise _raised(f"{module}:{name} failed", fault, action, notes) from None


def _source(returned: Any, module: str, name: str, keywords: Mapping[str, Any]) -> Source:
    """A training step of what a factory returned. Raises MeshwrightError E0112."""
    place = f"{module}:{name}"
    parts = _parts(returned, place)
    try:
        settings = TrainSettings(
            steps=int(parts.get("steps", 100)),
            seed=int(parts.get("seed", 0)),
            checkpoint_every=parts.get("checkpoint_every"),
            data=_data(parts.get("data")),
        )
        if not -(2**63) <= settings.seed < 2**63:
            raise ValueError(f"the seed {settings.seed} is no int64")
    except (TypeError, ValueError) as fault:
        raise error("E0112", f"{place} returns settings that do not fit: {fault}", action=_wanted()) from None
    return Source(
        description=SourceDescription("factory", place, name, dict(keywords)),
        model=parts["model"],
        batch=parts["batch"],
        optimizer=parts["optimizer"],
        loss=parts.get("loss"),
        clip=_clip(parts.get("clip"), place),
        precision=_precision(parts.get("precision"), place),
        separability=_separability(parts.get("separability"), place),
        batch_dims=parts.get("batch_dims"),
        scheduler=parts.get("scheduler"),
        train=settings,
    )


def _precision(given: Any, place: str) -> Precision:
    """Raises MeshwrightError E0112 for what is no precision, E0321 for one that is unknown."""
    if given is None or isinstance(given, Precision):
        return given or Precision()
    if not isinstance(given, str):
        found = f"it is of type {type(given).__name__}"
        raise error("E0112", f"{place} must return {FIELDS['precision']}; {found}", action='return "bf16", say')
    return parse_precision(given)


def _separability(given: Any, place: str) -> tuple[Declaration, ...]:
    """Raises MeshwrightError E0112 for what is no declaration, E0765 for a meaning that is none."""
    if given is None or isinstance(given, (str, Mapping)):
        return declarations(given)
    found = f"it is of type {type(given).__name__}"
    action = 'return "global", or {"encoder.*.norm": "global"}, say'
    raise error("E0112", f"{place} must return {FIELDS['separability']}; {found}", action=action)


def _clip(clip: Any, place: str) -> float | None:
    try:
        value = None if clip is None else float(clip)
    except (TypeError, ValueError, OverflowError):
        value = math.nan
    if value is not None and not 0 < value < math.inf:
        message = f"{place} returns the clip {clip!r}: the largest gradient norm is a finite number above zero"
        raise error("E0112", message, action="return a number above zero, or None for no clipping")
    return value


def _find(module: str, name: str) -> Callable[..., Any]:
    """The factory; modules are also looked for in the working folder, as Python itself does."""
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        imported = importlib.import_module(module)
    except ModuleNotFoundError as fault:
        if fault.name is not None and (module == fault.name or module.startswith(f"{fault.name}.")):
            action = "give it as package.module:factory, seen from the folder where the command runs"
            raise error("E0110", f"there is no module '{module}'", action=action) from None
        raise _raised(f"cannot import '{module}'", fault, "install what it needs, or correct it") from None
    except (Exception, SystemExit) as fault:  # whatever the user's module raises is told, not thrown
        raise _raised(f"cannot import '{module}'", fault, "correct the module") from None
    found = getattr(imported, name, None)
    if not callable(found):
        names = [n for n, value in vars(imported).items() if callable(value) and not n.startswith("_")]
        raise error("E0110", f"'{module}' has no function '{name}'", action=suggestion(name, names))
    function: Callable[..., Any] = found
    return function


def _raised(what: str, fault: BaseException, action: str, notes: tuple[str, ...] = ()) -> MeshwrightError:
    """The error of the user's own code, with the line of it that raised."""
    frames = [f for f in traceback.extract_tb(fault.__traceback__) if not f.filename.startswith("<")]
    own = [f for f in frames if os.path.dirname(torch.__file__) not in f.filename and f.filename != __file__]
    origin = Origin("", own[-1].filename, own[-1].lineno or 0, own[-1].line or "") if own[1:] or own else None
    if origin is not None and "importlib" in origin.file:
        origin = None
    return error("E0111", f"{what}: {type(fault).__name__}: {fault}", origin, action, notes)


def _parts(returned: Any, place: str) -> dict[str, Any]:
    """What was returned, by field, checked."""
    if isinstance(returned, tuple):
        if len(returned) not in (3, 4):
            raise error("E0112", f"{place} returns a tuple of {len(returned)}", action=_wanted())
        parts = dict(zip(_ORDER, returned, strict=False))
    elif isinstance(returned, Mapping):
        for key in returned:
            if key not in FIELDS:
                close = nearest(str(key), FIELDS)
                action = f"did you mean '{close}'?" if close else f"it may return: {', '.join(FIELDS)}"
                raise error("E0112", f"{place} returns an unknown '{key}'", action=action)
        parts = dict(returned)
    else:
        parts = {field: getattr(returned, field) for field in FIELDS if hasattr(returned, field)}
    for field, kind in (("model", nn.Module), ("batch", object), ("optimizer", torch.optim.Optimizer)):
        if field not in parts or not isinstance(parts[field], kind):
            found = (
                f"its '{field}' is of type {type(parts[field]).__name__}"
                if field in parts
                else f"there is no '{field}'"
            )
            raise error("E0112", f"{place} must return {FIELDS[field]}; {found}", action=_wanted())
    if parts.get("loss") is not None and not callable(parts["loss"]):
        raise error("E0112", f"{place} returns a loss that cannot be called", action=_wanted())
    return {field: value for field, value in parts.items() if value is not None}


def _wanted() -> str:
    return "return (model, batch, optimizer) or (model, batch, optimizer, loss), or a dict with these names"


def _data(given: Any) -> DataSettings:
    if given is None:
        return DataSettings()
    return given if isinstance(given, DataSettings) else DataSettings(**given)
