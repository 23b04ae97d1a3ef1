"""What becomes of the outputs of ``micro`` over the microbatches of a step.

An output that owes a reduction over the axis ``micro`` is reduced from one microbatch to the next, gradients in the
dtype of the plan's gradient reduction or a wider one. An output that is cut by the axis is collected and joined.
Any other is the same for every microbatch (a buffer, read by all as it was when the step began); the last one counts.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from meshwright.compiler.diagnostics import InternalError
from meshwright.compiler.mesh import MICRO, Mesh, Sharding
from meshwright.runtime.layout import reduce_in_order
from meshwright.runtime.microbatch import join_microbatches

PRECISIONS = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}
"""The dtypes of the names that a plan's ``precision`` uses."""


class Accumulator:
    """One output of ``micro``: :meth:`add` it after each microbatch, then :meth:`take` the total."""

    def __init__(self, sharding: Sharding, mesh: Mesh, dtype: torch.dtype | None = None) -> None:
        owed = [reduction for axis, reduction in sharding.partial if axis == MICRO]
        self.reduction = owed[0] if owed else None
        self.collects = MICRO in sharding.axes
        if self.reduction and self.collects:
            raise InternalError(f"an output of micro is cut by the axis micro and owes a sum over it: {sharding}")
        self.sharding = sharding
        self.mesh = mesh
        self.dtype = dtype
        self._value: Tensor | None = None
        self._parts: list[Tensor] = []

    def add(self, value: Tensor, taken: set[int]) -> None:
        """Take over ``value``. ``taken`` holds the memory (see :func:`memory`) that belongs to others."""
        if self.collects:
            self._parts.append(_own(value, taken))
        elif self.reduction is None:
            self._value = _own(value, taken)
        elif self._value is None:
            wide = value.to(torch.promote_types(value.dtype, self.dtype)) if self.dtype else value
            self._value = _own(wide, taken)
        elif self.reduction == "sum":
            self._value += value
        else:
            self._value = reduce_in_order([self._value, value], self.reduction)

    def take(self) -> tuple[Tensor, Sharding]:
        """The total and how it lies on the device mesh; the accumulator is empty after."""
        value, parts, self._value, self._parts = self._value, self._parts, None, []
        if self.collects:
            return join_microbatches(parts, self.sharding, self.mesh)
        if value is None:
            raise InternalError("an output of micro was taken before any microbatch was run")
        partial = [(axis, reduction) for axis, reduction in self.sharding.partial if axis != MICRO]
        return value, self.sharding.owing(partial)


def memory(tensors: Iterable[Tensor]) -> set[int]:
    """The addresses of the memory in which the tensors live."""
    return {t.untyped_storage().data_ptr() for t in tensors if t.numel()}


def _own(value: Tensor, taken: set[int]) -> Tensor:
    """``value`` in memory that nobody else has and that may be written; ``taken`` grows by it."""
    # an expanded tensor has several elements in one place, so writing into it is wrong as well
    shares = not memory([value]).isdisjoint(taken) or any(
        s == 0 and n > 1 for s, n in zip(value.stride(), value.shape, strict=True)
    )
    own = value.clone(memory_format=torch.contiguous_format) if shares else value
    taken |= memory([own])
    return own
