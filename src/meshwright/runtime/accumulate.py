"""What becomes of the outputs of ``micro`` over the microbatches of a step.

An output that owes a reduction over the axis ``micro`` is reduced from one microbatch to the next, gradients in the
dtype of the plan's gradient reduction or a wider one. An output that is cut by the axis is collected and joined.
Any other is the same for every microbatch (a buffer, read by all as it was when the step began); the last one counts.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from meshwright.compiler.diagnostics import InternalError
from meshwright.compiler.mesh import MICRO, Mesh, Sharding
from meshwright.runtime.layout import reduce_in_order
from meshwright.runtime.microbatch import join_microbatches


class Product(NamedTuple):
    """An output that is still two matrices."""

    left: Tensor
    right: Tensor

    def made(self) -> Tensor:
        return self.left.mm(self.right)


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
        self._parts: dict[int, Tensor] = {}

    @property
    def adds_up(self) -> bool:
        """Whether the total is made of all microbatches."""
        return self.collects or self.reduction is not None

    def add(self, value: Tensor | Product, taken: Taken, microbatch: int) -> None:
        """Take over ``value``, unless its memory is ``taken``: then a copy of it."""
        if isinstance(value, Product):
            total = self._value
            if total is not None and self.reduction == "sum" and total.dtype == value.left.dtype:
                total.addmm_(value.left, value.right)
                return
            value = value.made()
        if self.collects:
            self._parts[microbatch] = _own(value, taken)
        elif self.reduction is None:
            self._value = _own(value, taken)
        elif self._value is None:
            wide = value.to(torch.promote_types(value.dtype, self.dtype)) if self.dtype else value
            self._value = _own(wide, taken)
        else:
            self.put(microbatch, value)

    def pieces(self) -> dict[int, Tensor]:
        """What there is: by microbatch, in their order, or what was reduced, as if of the first one."""
        if self.collects:
            return dict(sorted(self._parts.items()))
        return {} if self._value is None else {0: self._value}

    def put(self, microbatch: int, value: Tensor) -> None:
        """Add what other microbatches have given: one, or many that are reduced already."""
        if self.collects:
            self._parts[microbatch] = value
        elif self.reduction == "sum" and self._value is not None:
            self._value += value
        elif self.reduction is not None and self._value is not None:
            self._value = reduce_in_order([self._value, value], self.reduction)
        else:
            raise InternalError(f"an output of micro that lies as {self.sharding} has nothing to be added to")

    def take(self) -> tuple[Tensor, Sharding]:
        """The total and how it lies on the device mesh; the accumulator is empty after."""
        value, parts, self._value, self._parts = self._value, self._parts, None, {}
        if self.collects:
            return join_microbatches([part for _, part in sorted(parts.items())], self.sharding, self.mesh)
        if value is None:
            raise InternalError("an output of micro was taken before any microbatch was run")
        partial = [(axis, reduction) for axis, reduction in self.sharding.partial if axis != MICRO]
        return value, self.sharding.owing(partial)


class Taken:
    """Memory that belongs to somebody: by address of each storage, the stretches of bytes in use.

    Gradients that came in one message are parts of one storage, and each may be written in its own part.
    """

    def __init__(self) -> None:
        self._stretches: dict[int, list[tuple[int, int]]] = {}

    def whole(self, tensors: Iterable[Tensor]) -> None:
        """Take all of the memory in which the tensors live."""
        for tensor in tensors:
            if tensor.numel():
                storage = tensor.untyped_storage()
                start = storage.data_ptr()
                self._stretches[start] = [(start, start + storage.nbytes())]

    def take(self, tensor: Tensor) -> bool:
        """Take the stretch that the tensor lies in, unless some of it is taken. Returns whether it could be."""
        if not tensor.numel():
            return True
        start = tensor.data_ptr()
        reach = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
        end = start + (reach + 1) * tensor.element_size()
        stretches = self._stretches.setdefault(tensor.untyped_storage().data_ptr(), [])
        if any(start < there_end and there_start < end for there_start, there_end in stretches):
            return False
        stretches.append((start, end))
        return True


class AllTaken(Taken):
    """As if all memory belonged to somebody: whatever is taken over is copied."""

    def take(self, tensor: Tensor) -> bool:
        return False


def _own(value: Tensor, taken: Taken) -> Tensor:
    """``value`` in memory that nobody else has and that may be written; ``taken`` grows by it."""
    # an expanded tensor has several elements in one place, so writing into it is wrong as well
    expanded = any(s == 0 and n > 1 for s, n in zip(value.stride(), value.shape, strict=True))
    if not expanded and taken.take(value):
        return value
    own = value.clone(memory_format=torch.contiguous_format)
    taken.take(own)
    return own
