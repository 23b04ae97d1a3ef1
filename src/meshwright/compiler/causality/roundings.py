"""Rounds otherwise: how far an output is carried by what float64 leaves open, so that it is not taken for a leak.

Most ops are as exact as their operands, so nudging the weights shows how roundings grow. A solver or a Fourier
transform is exact to the largest element of its matrix or signal alone (backward stable by norm), so that zeros of a
triangle are as good as roundings of its largest element: their operands are nudged by that.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from meshwright.compiler.graph.adapter import OpOverload, TorchDispatchMode, overload_name

_EPSILON = 2e-16
_BY_NORM = ("aten.linalg_", "aten._linalg_", "aten.inverse", "aten.cholesky", "aten.lu_", "aten._fft_", "aten.svd")
_BY_ELEMENT = ("aten.linalg_solve_triangular", "aten.linalg_vector_norm", "aten.linalg_cross", "aten.linalg_diagonal")


class Roundings(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves it without types
    """Operands of solvers and transforms are off by a rounding of the largest element of their matrix."""

    def __init__(self, pattern: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it without types
        self.pattern = pattern

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = overload_name(func) if isinstance(func, OpOverload) else ""
        if name.startswith(_BY_NORM) and not name.startswith(_BY_ELEMENT) and not func._schema.is_mutable:
            args = tuple(_nudged(a, self.pattern) for a in args)
        return func(*args, **(kwargs or {}))


def _nudged(value: Any, pattern: int) -> Any:
    if not isinstance(value, Tensor) or value.dtype != torch.float64 or value.dim() < 2:
        return value
    line = torch.arange(value.numel(), dtype=torch.float64).reshape(value.shape)
    return value + _EPSILON * torch.cos((2 + pattern) * line) * value.abs().amax((-2, -1), keepdim=True)
