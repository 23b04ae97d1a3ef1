"""The messages of ranks written in ops whose rules tell intervals: whole tensors joined, added, and cut.

An exchange lays what comes of each rank side by side in one dim, of which intervals keep no more than what all of it
has in common; joined and cut anew it gives the same tensor. A message of several tensors is one for each, and one that
begins is carried out at once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from meshwright.compiler.graph import collectives
from meshwright.compiler.graph.pending import Done, Pending


def _all_to_all(x: Tensor, split: int, join: int, axis: str, size: int) -> Tensor:
    return collectives.shard(collectives.all_gather(x, join, (axis,), size), split, (axis,))


def _reduce_scatter_wide(x: Tensor, dim: int, axes: tuple[str, ...], dtype: torch.dtype) -> Tensor:
    return collectives.reduce_scatter(x, dim, axes).to(dtype)


def _all_gather_many(xs: list[Tensor], dims: list[int], axes: tuple[str, ...], sizes: list[int]) -> list[Tensor]:
    return [collectives.all_gather(x, dim, axes, size) for x, dim, size in zip(xs, dims, sizes, strict=True)]


def _reduce_scatter_many(xs: list[Tensor], dims: list[int], axes: tuple[str, ...]) -> list[Tensor]:
    return [collectives.reduce_scatter(x, dim, axes) for x, dim in zip(xs, dims, strict=True)]


def _reduce_scatter_wide_many(
    xs: list[Tensor], dims: list[int], axes: tuple[str, ...], dtype: torch.dtype
) -> list[Tensor]:
    return [_reduce_scatter_wide(x, dim, axes, dtype) for x, dim in zip(xs, dims, strict=True)]


def _all_reduce_many(
    xs: list[Tensor], axes: tuple[str, ...], reduction: str = "sum", owned: bool = False
) -> list[Tensor]:
    return [collectives.all_reduce(x, axes, reduction) for x in xs]


def _begun(message: Callable[..., list[Tensor]]) -> Callable[..., Pending]:
    def begin(*args: Any, **kwargs: Any) -> Pending:
        return Pending(tuple(Done(made) for made in message(*args, **kwargs)), lambda done: done)

    return begin


TOLD: Mapping[Any, Callable[..., Any]] = {
    collectives.all_to_all: _all_to_all,
    collectives.reduce_scatter_wide: _reduce_scatter_wide,
    collectives.all_gather_many: _all_gather_many,
    collectives.reduce_scatter_many: _reduce_scatter_many,
    collectives.reduce_scatter_wide_many: _reduce_scatter_wide_many,
    collectives.all_reduce_many: _all_reduce_many,
    collectives.all_gather_begin: _begun(_all_gather_many),
    collectives.reduce_scatter_begin: _begun(_reduce_scatter_many),
    collectives.reduce_scatter_wide_begin: _begun(_reduce_scatter_wide_many),
    collectives.all_reduce_begin: _begun(_all_reduce_many),
}
"""By function of a rank's program what computes the same so that rules tell what it sees."""
