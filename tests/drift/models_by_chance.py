"""Models that draw by chance in training, and so compute something else in evaluation."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.drift.models import Base


class StochasticDepth(Base):
    """Leaves out a branch by chance while training."""

    def middle(self, x: Tensor) -> Tensor:
        kept = (torch.rand(x.shape[0], 1, 1) < 0.8) / 0.8 if self.training else 1
        return x + self.out(x) * kept if self.training else x + self.out(x)


class Noisy(Base):
    """Multiplied or added in training alone, by what is drawn."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def middle(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        if self.kind == "kept, not rescaled":
            return x * (torch.rand_like(x) > 0.2)
        if self.kind == "kept and rescaled":
            return x * (torch.rand_like(x) > 0.2) / 0.8
        if self.kind == "jitter":
            return x * torch.empty_like(x).uniform_(0.9, 1.1)
        assert self.kind == "added, above zero"
        return x + torch.rand_like(x)


class RowsNotRescaled(Base):
    """A branch that training leaves out for half of the rows, and evaluation takes whole."""

    def middle(self, x: Tensor) -> Tensor:
        branch = self.out(x)
        if self.training:
            branch = branch * (torch.rand(x.shape[0], 1, 1) > 0.5)
        return x + branch


class Gumbel(Base):
    """Noise that is not zero on average, and shifts all scores of a softmax alike."""

    def middle(self, x: Tensor) -> Tensor:
        scores = self.out(x)
        if self.training:
            scores = scores - torch.empty_like(scores).exponential_().log()
        return x * scores.softmax(-1)
