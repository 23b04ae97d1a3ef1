"""Computes in float64 whatever a model asks for."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from meshwright.compiler.causality.interpreter import is_view
from meshwright.compiler.graph.adapter import OpOverload, TorchDispatchMode

NARROW = (torch.float32, torch.float16, torch.bfloat16)


class Widen(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves it without types
    """Computes in float64 what asks for less: every operand, and every dtype that an op is given."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not isinstance(func, OpOverload) or is_view(func) or func._schema.is_mutable:
            return func(*args, **kwargs)
        args, kwargs = tuple(widened(a) for a in args), {k: widened(v) for k, v in kwargs.items()}
        if func is torch.ops.aten._grouped_mm.default and args[0].dim() == 2:
            return grouped_product(args[0], args[1], args[2] if len(args) > 2 else kwargs["offs"])
        return func(*args, **kwargs)


def grouped_product(rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """``_grouped_mm`` in any dtype: rows up to each end times the weights of their group."""
    made = rows.new_zeros(rows.shape[0], weights.shape[-1])
    start = 0
    for group, end in enumerate(ends.tolist()):
        made[start:end] = rows[start:end] @ weights[group]
        start = end
    return made


def with_digits(value: Tensor) -> Tensor:
    """In float64, with digits beyond those of float32: sums of such numbers would be exact otherwise."""
    line = torch.arange(value.shape[-1] if value.dim() else 1, dtype=torch.float64)
    return value.double() * (1 + 1e-9 * torch.cos(line if value.dim() else line[0]))


def widened(value: Any) -> Any:
    if isinstance(value, Tensor):
        if value.dtype == torch.complex64:
            return value.to(torch.complex128)
        return value.double() if value.dtype in NARROW else value
    if isinstance(value, torch.dtype):
        return torch.float64 if value in NARROW else torch.complex128 if value == torch.complex64 else value
    if isinstance(value, list | tuple) and any(isinstance(v, Tensor) for v in value):
        return [widened(v) for v in value]
    return value
