"""Small steps that couple samples, each in its own way, and some that do not."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.field.against_one_device import Case


class Coupled(nn.Module):
    """A batch statistic with a buffer, and two balance losses, of ``groups`` groups of the batch (for the losses,
    ``balanced``), each by itself: what a declaration asks of the model with one group, written out."""

    def __init__(self, groups: int = 1, balanced: int | None = None) -> None:
        super().__init__()
        self.groups, self.balanced = groups, groups if balanced is None else balanced
        self.first = nn.Linear(5, 6)
        self.router = nn.Linear(6, 4)
        self.second = nn.Linear(6, 3)
        self.scale = nn.Parameter(torch.rand(6))
        self.temperature = nn.Parameter(torch.tensor(0.7))
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        g = self.first(x).reshape(self.groups, -1, 6)
        mean = g.mean(1, keepdim=True)
        variance = (g - mean).square().mean(1, keepdim=True)
        self.mean.copy_(0.9 * self.mean + 0.1 * mean.mean((0, 1)).detach())
        z = ((g - mean) * torch.rsqrt(variance + 1e-5) * self.scale).reshape(-1, 6)
        p = self.router(z.tanh()).softmax(-1).reshape(self.balanced, -1, 4)
        chosen = (p >= p.amax(-1, keepdim=True)).to(p.dtype).mean(1)
        balance = (chosen * p.mean(1)).sum(-1)
        spread = self.temperature * (p.mean(1).square().sum(-1) + 1e-2).log()
        return F.cross_entropy(self.second(z.relu()), target) + 0.5 * balance.mean() + 0.1 * spread.mean()


class Capacity(nn.Module):
    """At most two samples to each of four experts, the first ones of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(5, 4)

    def forward(self, x: Tensor) -> Tensor:
        gates = self.router(x)
        place = F.one_hot(gates.argmax(-1), 4).cumsum(0)
        return (gates * (place <= 2)).square().mean()


class RootOfMean(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).square().mean().sqrt()


class Separable(nn.Module):
    """A sum over samples by a count of the whole batch, and a penalty that has nothing to do with it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 4)

    def forward(self, x: Tensor) -> Tensor:
        valid = (x[:, 0] > 0).to(x.dtype)
        return (self.layer(x).square().sum(-1) * valid).sum() / valid.sum() + self.layer.weight.square().sum().sqrt()


class Deep(nn.Module):
    """Blocks, of which a pipeline can be made, and a statistic of ``groups`` groups of the batch at the end."""

    def __init__(self, groups: int = 1) -> None:
        super().__init__()
        self.groups = groups
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(5, 5), nn.Tanh()) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        g = x.reshape(self.groups, -1, 5)
        return ((g - g.mean(1, keepdim=True)) ** 4).mean()


class Norms(nn.Module):
    """Blocks with a batch normalisation each: what comes after one depends on all samples."""

    def __init__(self, blocks: int = 4, width: int = 5) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width), nn.Tanh()) for _ in range(blocks)
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x.square().mean()


class Balanced(nn.Module):
    """A block with a balance loss of its own, beside what goes on to the next block."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = nn.Linear(width, width)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.layer(x).tanh()
        gates = y.softmax(-1)
        chosen = (gates >= gates.amax(-1, keepdim=True)).to(x.dtype)
        return x + y, (chosen.mean(0) * gates.mean(0)).sum()


class Balances(nn.Module):
    """Blocks with a balance loss each."""

    def __init__(self, blocks: int = 4, width: int = 5) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Balanced(width) for _ in range(blocks))

    def forward(self, x: Tensor) -> Tensor:
        balance = torch.zeros((), dtype=x.dtype)
        for layer in self.layers:
            x, more = layer(x)
            balance = balance + more
        return x.square().mean() + 0.3 * balance


class Contrasts(Deep):
    """Every sample is compared with all."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return super().forward(x) + (x @ x.T).logsumexp(-1).mean()


def coupled(groups: int = 1, balanced: int | None = None) -> Case:
    """Samples lie far apart, so that statistics of some of them are far off."""
    torch.manual_seed(0)
    offset = torch.arange(8, dtype=torch.float64)[:, None]
    batches = [
        {"x": torch.randn(8, 5, dtype=torch.float64) + offset, "target": torch.randint(3, (8,))} for _ in range(2)
    ]
    return Case(Coupled(groups, balanced).double(), batches, clip=0.5)


def case(model: nn.Module) -> Case:
    """Two steps of a model of one input."""
    torch.manual_seed(1)
    return Case(model.double(), [{"x": torch.randn(8, 5, dtype=torch.float64)} for _ in range(2)])
