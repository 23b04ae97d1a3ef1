"""Shape, strides and dtype of a local tensor: what messages are counted from."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor, fx

from meshwright.compiler.analysis.strides import contiguous
from meshwright.compiler.graph.dtypes import short_name
from meshwright.compiler.graph.program import annotation


@dataclass(frozen=True)
class Shaped:
    """Shape, strides and dtype of a tensor."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    itemsize: int

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.itemsize

    def moved(self, dim: int) -> Shaped:
        """With ``dim`` in front."""
        order = [dim, *(d for d in range(len(self.shape)) if d != dim)]
        return Shaped(
            tuple(self.shape[d] for d in order), tuple(self.strides[d] for d in order), self.dtype, self.itemsize
        )

    def packed(self) -> bool:
        return contiguous(self.shape, self.strides)

    def rows(self, count: int) -> Shaped:
        """A contiguous tensor with ``count`` in place of dim 0."""
        shape = (count, *self.shape[1:])
        strides = tuple(math.prod(shape[d + 1 :]) for d in range(len(shape)))
        return Shaped(shape, strides, self.dtype, self.itemsize)


def shaped(node: fx.Node) -> Shaped:
    """The tensor that a node yields."""
    value = node.meta.get("val")
    if isinstance(value, Tensor):
        shape = tuple(int(n) for n in value.shape)
        return Shaped(shape, tuple(value.stride()), short_name(value.dtype), value.element_size())
    note = annotation(node)
    assert note.dtype is not None, f"{node} has no dtype"
    made = Shaped(note.shape, (), short_name(note.dtype), note.dtype.itemsize)
    return made.rows(note.shape[0]) if note.shape else made
