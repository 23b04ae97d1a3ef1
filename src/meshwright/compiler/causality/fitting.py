"""Whether a batch can be asked about: its tensors, the dims of rows and positions, and the segments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


class Unfit(Exception):
    """The inputs cannot be used, or cannot be made of a size. ``action`` is what to do about it."""

    def __init__(self, reason: str, action: str = "") -> None:
        super().__init__(reason)
        self.action = action


class Exit(Exception):
    """The user's code has asked Python to exit, which ends no check."""

    action = "let the model raise an exception, or return"


def action_of(fault: Exception) -> str:
    """What to do about what stopped a run; empty for what the model itself has raised."""
    return fault.action if isinstance(fault, Unfit | Exit) else ""


def refuse_values(names: Sequence[str], tensors: Sequence[Tensor], segments: Any) -> None:
    """Raise Unfit for inputs that have no values, for none at all, and for segments that are none."""
    if not tensors:
        raise Unfit("the batch holds no tensor", "give a tensor, a tuple of arguments, or a dict of them by name")
    for name, value in zip(names, tensors, strict=True):
        if value.is_meta:
            raise Unfit(f"the input '{name}' is on the meta device and has no values", "give a batch on the CPU")
    if segments is not None and not isinstance(segments, str | Tensor):
        told = f"segments are of type {type(segments).__name__}"
        raise Unfit(told, "give the name of an input, or a tensor of rows and positions")


def without_tokens(names: Sequence[str], tensors: Sequence[Tensor], own: int | None, time_dim: int) -> Unfit:
    """Why no input is of tokens."""
    if not 0 <= time_dim < max(t.dim() for t in tensors):
        told = ", ".join(f"'{n}' has {t.dim()}" for n, t in zip(names, tensors, strict=True))
        return Unfit(f"time_dim is {time_dim}, but of dims {told}", "say with time_dim which dim is that of positions")
    told = "; ".join(
        f"'{n}' tells the segments" if i == own else _why_no_tokens(n, t, time_dim)
        for i, (n, t) in enumerate(zip(names, tensors, strict=True))
    )
    return Unfit(f"no input is of tokens: {told}", "give the model an input of token ids or of floating activations")


def _why_no_tokens(name: str, value: Tensor, time_dim: int) -> str:
    if value.dtype == torch.bool:
        return f"'{name}' is Boolean, which is taken as a mask"
    if value.dim() <= time_dim:
        return f"'{name}' has no dim {time_dim} of positions"
    return f"'{name}' is taken by its name as a mask, as positions or as segments"


def resolved_dims(name: str, value: Tensor, batch_dim: int | None, time_dim: int) -> tuple[int | None, int]:
    """Both dims counted from the front of the tokens. Raises Unfit for dims that there are not, that are one, or that
    are empty."""
    found = []
    for said, dim in (("batch_dim", batch_dim), ("time_dim", time_dim)):
        if dim is not None and not -value.dim() <= dim < value.dim():
            told = f"{said} is {dim}, but '{name}' is of shape {list(value.shape)}"
            raise Unfit(told, f"give a {said} of 0 to {value.dim() - 1}")
        found.append(None if dim is None else dim % value.dim())
    rows, time = found
    assert time is not None
    if rows == time:
        action = "give two dims, or batch_dim=None for a function of one row"
        raise Unfit(f"batch_dim and time_dim are the same dim {time} of '{name}'", action)
    for said, dim in (("rows", rows), ("positions", time)):
        if dim is not None and not value.shape[dim]:
            action = f"give a batch of one or more {said}, and say its dims"
            raise Unfit(f"'{name}', of shape {list(value.shape)}, has no {said}", action)
    return rows, time


def no_output(shapes: Sequence[Sequence[int]], rows: int, length: int, batch_dim: int | None, time_dim: int) -> Unfit:
    """What is wrong with outputs none of which has the dims of the tokens."""
    told = ", ".join(str(list(shape)) if shape else "one number" for shape in shapes[:4]) or "no tensor"
    size = f"{length} positions" if batch_dim is None else f"{rows} rows of {length} positions"
    where = f"positions at dim {time_dim}"
    if batch_dim is not None:
        where = f"rows at dim {batch_dim} and {where}"
    action = f"let the model, or a function around it, return a tensor with {where}, as its input has"
    return Unfit(f"the model returns {told} for {size}: no output has the dims of the input", action)
