"""Functions of torch that have no types, with types."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def distinct(value: Tensor) -> Tensor:
    """The values that occur, sorted."""
    found: Tensor = torch.unique(value)
    return found


def joint_shape(*shapes: Sequence[int]) -> torch.Size:
    """The shape that all broadcast to."""
    found: torch.Size = torch.broadcast_shapes(*(tuple(s) for s in shapes))  # type: ignore[no-untyped-call]  # torch leaves it without types
    return found


def split_dim(value: Tensor, dim: int, sizes: Sequence[int]) -> Tensor:
    """A dim as several; one of the sizes may be -1."""
    found: Tensor = value.unflatten(dim, tuple(sizes))  # type: ignore[no-untyped-call]  # torch leaves it without types
    return found


def put(base: Tensor, where: Sequence[Tensor | None], values: Tensor, adds: bool = False) -> Tensor:
    """A copy of ``base`` with values written at integer indices, None for a whole dim."""
    found: Tensor = torch.ops.aten.index_put.default(base, list(where), values, adds)
    return found
