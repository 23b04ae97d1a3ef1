"""What is known of each element of a tensor."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

LOW = 1
"""Trait: a mask's number so far below all scores that ``exp`` makes zero of it, if scores stay moderate."""

VERY_LOW = 2
"""Trait: likewise, and so far below that no finite score of the dtype comes near it."""

MAYBE_LOW = 4
"""Trait: a masking number or an ordinary one, as the input says."""

MAYBE_GONE = 16
"""Trait: minus infinity or an ordinary number, as the input says."""

CHOICE = 8
"""Trait: 0 or another value, by a comparison: what is multiplied with it is chosen rather than mixed."""


@dataclass(frozen=True)
class Shadow:
    """Fields have the tensor's shape; ``deps`` has one more dim, of words. None says that no element has any."""

    known: Tensor
    """bool: the value is the same for every input and every weight."""
    deps: Tensor | None = None
    item: Tensor | None = None
    """int32 code of the item (of a sorted listing) that the element belongs to; 0 for none."""
    rank: Tensor | None = None
    """int32 code of the item whose place in its listing the element's value is; 0 for none."""
    trait: Tensor | None = None
    """uint8 flags."""

    @property
    def shape(self) -> torch.Size:
        return self.known.shape

    def expand(self, shape: Any) -> Shadow:
        """Broadcast to a shape."""
        shape = tuple(shape)
        if tuple(self.known.shape) == shape:
            return self
        return self.map(lambda x: x.expand(shape), lambda x: x.expand(*shape, x.shape[-1]))

    def map(self, one: Any, words: Any = None) -> Shadow:
        """Apply a function to each field, ``words`` to that of the sets."""
        return Shadow(
            one(self.known),
            None if self.deps is None else (words or one)(self.deps),
            None if self.item is None else one(self.item),
            None if self.rank is None else one(self.rank),
            None if self.trait is None else one(self.trait),
        )

    def plain(self) -> Shadow:
        """Without items, ranks and traits."""
        return Shadow(self.known, self.deps)

    def with_deps(self, deps: Tensor | None) -> Shadow:
        return replace(self, deps=deps)

    def has(self, trait: int) -> Tensor:
        """Where an element has one of the traits."""
        if self.trait is None:
            return torch.zeros((), dtype=torch.bool).expand(self.known.shape)
        return (self.trait & trait) != 0


def nothing(truth: Tensor) -> bool:
    """Whether no element is True; of what is one value spread out, by looking at that one."""
    if truth.numel() == 0:
        return True
    for dim, step in enumerate(truth.stride()):
        if step == 0:
            truth = truth.narrow(dim, 0, 1)
    return not bool(truth.any())


def meet(a: Tensor, b: Tensor) -> Tensor:
    """Where both are True, of one shape; what is one value spread out in both stays so."""
    shape = a.shape
    for dim in range(a.dim()):
        if shape[dim] > 1 and a.stride(dim) == 0 and b.stride(dim) == 0:
            a, b = a.narrow(dim, 0, 1), b.narrow(dim, 0, 1)
    return (a & b).expand(shape)


_UNKNOWN, _KNOWN = torch.tensor(False), torch.tensor(True)


def constant(shape: Any, known: bool = True) -> Shadow:
    """The shadow of what depends on no token: of a constant, or of a weight, which is not known."""
    return Shadow((_KNOWN if known else _UNKNOWN).expand(tuple(shape)))
