"""Steps with two couplings, of which a plan may declare different things: groups of either are written out.

``first`` and ``second`` say in how many groups of the batch each coupling is computed; with one of each it is the model
that is captured.
"""

from __future__ import annotations

import inspect

import torch
from torch import Tensor, nn

from meshwright.compiler.plan import Declaration, Meaning
from tests.field.against_one_device import Case
from tests.unit.separability.models import Coupled


class Two(nn.Module):
    """Weights of all of them."""

    def __init__(self, first: int = 1, second: int = 1) -> None:
        super().__init__()
        self.of_first, self.of_second = first, second
        self.layer, self.further = nn.Linear(5, 6), nn.Linear(6, 6)
        self.scale = nn.Parameter(torch.rand(6))


class Within(Two):
    """A statistic of samples that were centred by another, and a balance loss like the first."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x).reshape(self.of_first, -1, 6)
        y = y - y.mean(1, keepdim=True)  # first
        z = self.further(y.reshape(-1, 6).tanh()).reshape(self.of_second, -1, 6)
        z = z - z.mean(1, keepdim=True)  # second
        w = (z * self.scale).reshape(-1, 6).sin()
        balance = (w.reshape(self.of_first, -1, 6).mean(1) ** 2).sum(-1).mean()  # first
        return (w**4).mean() + balance


class Beside(Two):
    """Two losses of the same activations, and of the same weights."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x) * self.scale.exp()
        one = (y.tanh().reshape(self.of_first, -1, 6).mean(1) ** 2 * self.scale).sum(-1).mean()  # first
        other = (y.reshape(self.of_second, -1, 6).mean(1) ** 2 + self.scale.exp()).log().sum(-1).mean()  # second
        return y.square().mean() + one + 0.1 * other


class OneSum(Two):
    """One sum over samples, read by both."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        if self.of_first == self.of_second == 1:
            total = y.sum(0)
            a = ((y - total / len(x)) ** 4).mean()  # first
            b = ((total / len(x)) ** 3).sum()  # second
        else:
            groups = y.reshape(self.of_first, -1, 6)
            a = ((groups - groups.mean(1, keepdim=True)) ** 4).mean()
            b = (y.reshape(self.of_second, -1, 6).mean(1) ** 3).sum(-1).mean()
        return a + b


class Multiplied(Two):
    """One statistic times another."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        w = y.reshape(self.of_first, -1, 6).mean(1) ** 2 + self.scale  # first
        v = y.reshape(self.of_second, -1, 6).square().mean(1)
        return (v * w).sum(-1).mean() + y.square().mean()  # second


MODELS: tuple[type[Two], ...] = (Within, Beside, OneSum, Multiplied)


def case(model: type[Two], first: int = 1, second: int = 1) -> Case:
    """Two steps; samples lie far apart. The weights do not depend on the groups."""
    torch.manual_seed(0)
    made = model(first, second).double()
    offset = torch.arange(8, dtype=torch.float64)[:, None]
    return Case(made, [{"x": torch.randn(8, 5, dtype=torch.float64) + offset} for _ in range(2)])


def declared(model: type[nn.Module], first: Meaning, second: Meaning) -> tuple[Declaration, ...]:
    """Declarations of the lines that are marked as those of the first and of the second coupling."""
    source, number = inspect.getsourcelines(model.forward)
    marks = (("# first", first), ("# second", second))
    if model is Coupled:
        marks = (("variance = ", first), ("z = (", first), ("balance = ", second), ("spread = ", second))
    file = inspect.getsourcefile(model)
    return tuple(
        Declaration(f"{file}:{number + at}", meaning)
        for mark, meaning in marks
        for at, line in enumerate(source)
        if mark in line
    )
