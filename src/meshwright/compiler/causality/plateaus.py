"""Ops that are constant over a range: what stands on a plateau in every run has not been tried by any of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

SATURATING = frozenset(
    (
        *("relu", "relu6", "hardtanh", "hardsigmoid", "hardswish", "clamp", "clamp_min", "clamp_max"),
        *("threshold", "hardshrink", "softshrink"),
    )
)
_BOUNDS = {"relu": (0, None), "relu6": (0, 6), "hardsigmoid": (-3, 3), "hardswish": (-3, None)}


def living(name: str, arguments: Mapping[str, Any]) -> Tensor:
    """Where the result of a saturating op moves with its operand. Bounds that are tensors bound nothing here."""
    x: Tensor = arguments["self"]
    low: Any
    high: Any
    if name in _BOUNDS:
        low, high = _BOUNDS[name]
    elif name == "threshold":
        low, high = arguments["threshold"], None
    elif name in ("hardshrink", "softshrink"):
        beyond: Tensor = x.abs() > arguments["lambd"]
        return beyond
    elif name == "hardtanh":
        low, high = arguments["min_val"], arguments["max_val"]
    else:
        low, high = arguments.get("min"), arguments.get("max")
    made = torch.ones_like(x, dtype=torch.bool)
    if isinstance(low, int | float):
        made &= x > low
    if isinstance(high, int | float):
        made &= x < high
    return made
