"""What an error at an op does to the logits: a run in float64 in which the op's result is changed by as much."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from meshwright.compiler.causality.call import tensors_in
from meshwright.compiler.drift.recorder import Where, computes, is_cast
from meshwright.compiler.drift.step import Key
from meshwright.compiler.graph.adapter import TorchDispatchMode, is_mutable

Change = Callable[[Tensor], Tensor]
"""What is made of the result of an op."""


class Changing(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves it without types
    """Puts other results in the place of those of some ops."""

    supports_higher_order_operators = True

    def __init__(self, where: Where, changes: Mapping[Key, Change]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it without types
        self.where = where
        self.changes = changes

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if not computes(func) or is_cast(func):
            return out
        change = self.changes.get(self.where.key(func))
        made = tensors_in(out)
        if change is None or not made or not made[0].is_floating_point():
            return out
        if is_mutable(func):
            made[0].copy_(change(made[0]))
            return out
        if isinstance(out, Tensor):
            return change(out)
        return type(out)([change(made[0]), *list(out)[1:]])


def disturbing(where: Where, errors: Mapping[Key, float]) -> Changing:
    """Multiplies the results of some ops by ``1 + error * noise``, independent for each element."""
    drawing = torch.Generator().manual_seed(11)

    def by(error: float) -> Change:
        def disturbed(value: Tensor) -> Tensor:
            noise = torch.randn(value.shape, generator=drawing, dtype=torch.float64).to(value.dtype)
            # relative to the size of the result as a whole, as errors of sums are
            return torch.where(torch.isfinite(value), value * (1 + error * noise), value)

        return disturbed

    return Changing(where, {key: by(error) for key, error in errors.items() if error})
