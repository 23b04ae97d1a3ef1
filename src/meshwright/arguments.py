"""The arguments of ``parallelize``, each of which is checked before anything is done with them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from numbers import Integral, Real
from pathlib import Path
from typing import Any

import torch
from torch import nn

from meshwright.compiler.diagnostics import MeshwrightError, error, suggestion
from meshwright.compiler.plan import Plan, Precision
from meshwright.compiler.plan_reader import DTYPES
from meshwright.compiler.precision_text import parse_precision

_INT64 = range(-(2**63), 2**63)


def checked_model(model: object) -> nn.Module:
    """The model. Raises MeshwrightError E0651, as all functions here do."""
    if isinstance(model, nn.Module):
        return model
    raise _wrong("model", model, "give an nn.Module, made and with its weights")


def checked_optimizers(optimizer: object) -> list[torch.optim.Optimizer]:
    """The optimizers, one or several."""
    action = "give an optimizer made of the model's parameters, such as torch.optim.AdamW(model.parameters())"
    if isinstance(optimizer, torch.optim.Optimizer):
        return [optimizer]
    if not isinstance(optimizer, Sequence) or isinstance(optimizer, str) or not optimizer:
        raise _wrong("optimizer", optimizer, action)
    for one in optimizer:
        if not isinstance(one, torch.optim.Optimizer):
            raise _wrong("optimizer", one, action)
    return list(optimizer)


def checked_loss(loss: object) -> None:
    """Refuse a loss that cannot be called."""
    if loss is not None and not callable(loss):
        action = "give a function of (output, batch), or None if the model returns its loss"
        raise _wrong("loss", loss, action)


def checked_plan(plan: object) -> str | Path | Plan:
    """A preset, a path or a Plan."""
    if isinstance(plan, (str, Path, Plan)):
        return plan
    if isinstance(plan, Mapping) and plan:
        words = ",".join(f"{word}={size}" for word, size in plan.items())
        raise _wrong("plan", plan, f'write plan="{words}"')
    raise _wrong("plan", plan, 'give a preset such as "fsdp=2,tp=2", the path of a plan file, or a Plan')


def checked_clip(clip: object) -> float | None:
    """The largest norm, a positive finite number."""
    if clip is None:
        return None
    action = "give a finite number above zero, or None for no clipping"
    if isinstance(clip, bool) or not isinstance(clip, Real):
        raise _wrong("clip", clip, action)
    try:
        value = float(clip)
    except OverflowError:
        value = math.inf
    if not (math.isfinite(value) and value > 0):
        raise _wrong("clip", clip, action)
    return value


def checked_precision(precision: object) -> Precision | None:
    """A Precision; the name of a dtype is that of computation, with weights and reductions in fp32."""
    if precision is None:
        return None
    if isinstance(precision, str):
        precision = parse_precision(precision)
    if not isinstance(precision, Precision):
        raise _wrong("precision", precision, 'give the dtype to compute in, such as "bf16", or a Precision')
    for name in (precision.compute, precision.weights, precision.reduce):
        if name not in DTYPES:
            action = suggestion(name, DTYPES) if isinstance(name, str) else f"known: {', '.join(DTYPES)}"
            raise error("E0321", f"unknown precision {_shown(name)}", None, action)
    return precision


def checked_virtual(virtual: object) -> int | None:
    """The number of virtual ranks, at least one. Raises E0601 for numbers below."""
    if virtual is None:
        return None
    action = "use virtual=N with N of at least 1"
    if isinstance(virtual, bool) or not isinstance(virtual, Integral):
        raise _wrong("virtual", virtual, action)
    if virtual < 1:
        raise error("E0601", f"virtual={virtual} is no number of ranks", None, action)
    return int(virtual)


def checked_seed(seed: object) -> int:
    """A seed that fits the 64 bits of the step's key."""
    action = "give a whole number that fits 64 bits, such as 0"
    if isinstance(seed, bool) or not isinstance(seed, Integral) or int(seed) not in _INT64:
        raise _wrong("seed", seed, action)
    return int(seed)


def _wrong(name: str, value: Any, action: str) -> MeshwrightError:
    return error("E0651", f"'{name}' of parallelize cannot be {_shown(value)}", None, action)


def _shown(value: Any) -> str:
    """A value as a person would name it: small ones as they are, others by their type."""
    if isinstance(value, type):
        return f"the class {value.__name__}"
    if isinstance(value, str):
        return f"'{value}'" if len(value) <= 40 else f"'{value[:40]}...'"
    if isinstance(value, int) and abs(value) >= 2**64:
        return "a number of more than 64 bits"  # however many digits it has
    if value is None or isinstance(value, (bool, int, float)):
        return str(value)
    if isinstance(value, Sequence) and not value:
        return f"an empty {type(value).__name__}"
    return f"of type {type(value).__name__}"
