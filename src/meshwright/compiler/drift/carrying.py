"""What an error at an op does to the logits: a run in float64 in which the op's result is disturbed by as much."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from meshwright.compiler.causality.call import tensors_in
from meshwright.compiler.drift.recorder import Where, computes, is_cast
from meshwright.compiler.drift.step import Key
from meshwright.compiler.graph.adapter import TorchDispatchMode, is_mutable


class Disturbing(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves it without types
    """Multiplies the results of some ops by ``1 + error * noise``, independent for each element."""

    supports_higher_order_operators = True

    def __init__(self, where: Where, errors: dict[Key, float]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it without types
        self.where = where
        self.errors = errors
        self.drawing = torch.Generator().manual_seed(11)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if not computes(func) or is_cast(func):
            return out
        error = self.errors.get(self.where.key(func))
        made = tensors_in(out)
        if not error or not made or not made[0].is_floating_point():
            return out
        if is_mutable(func):
            made[0].copy_(self._disturbed(made[0], error))
            return out
        if isinstance(out, Tensor):
            return self._disturbed(out, error)
        return type(out)([self._disturbed(made[0], error), *list(out)[1:]])

    def _disturbed(self, value: Tensor, error: float) -> Tensor:
        noise = torch.randn(value.shape, generator=self.drawing, dtype=torch.float64).to(value.dtype)
        fine = torch.isfinite(value)
        # relative to the size of the result as a whole, as errors of sums are
        return torch.where(fine, value * (1 + error * noise), value)
