"""A communicator without other ranks: what it returns has the right shape, and no content."""

from __future__ import annotations

import torch
from torch import Tensor

from meshwright.compiler.graph.pending import Kind, Work, at_once
from meshwright.compiler.mesh import Mesh


class Shapes:
    """A communicator that answers with the right shapes, as rank 0. The mesh has the axis ``micro``."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh

    def coordinate(self, axis: str) -> int:
        return 0

    def all_reduce(self, x: Tensor, axes: tuple[str, ...], reduction: str) -> Tensor:
        return torch.empty_like(x)

    def all_gather(self, x: Tensor, axes: tuple[str, ...]) -> Tensor:
        return x.new_empty((x.shape[0] * self.mesh.size(*axes), *x.shape[1:]))

    def reduce_scatter(self, x: Tensor, axes: tuple[str, ...]) -> Tensor:
        return x.new_empty((x.shape[0] // self.mesh.size(*axes), *x.shape[1:]))

    def all_to_all(self, x: Tensor, axes: tuple[str, ...]) -> Tensor:
        return torch.empty_like(x)

    def begin(self, kind: Kind, x: Tensor, axes: tuple[str, ...], reduction: str = "sum") -> Work:
        return at_once(self, kind, x, axes, reduction)
