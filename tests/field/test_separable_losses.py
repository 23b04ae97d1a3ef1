"""Losses that are more than a mean of cross entropies: each part is scaled by what it means, not by a convention."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.field.against_one_device import Case, Loss, difference


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 12)
        self.second = nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)))


class Penalised(Model):
    """A penalty on the weights, which does not depend on the batch: it counts once, not once a rank or microbatch."""

    def forward(self, x: Tensor) -> Tensor:
        data = super().forward(x).square().mean()
        return data + 0.1 * sum(p.square().sum() for p in self.parameters())


class PenaltyAlone(Model):
    """The penalty is added to each sample's loss before the mean."""

    def forward(self, x: Tensor) -> Tensor:
        return (super().forward(x).square().sum(-1) + 0.1 * self.first.weight.abs().sum()).mean()


def mse(output: Tensor, batch: dict[str, Any]) -> Tensor:
    return F.mse_loss(output, batch["target"])


def mse_sum(output: Tensor, batch: dict[str, Any]) -> Tensor:
    return F.mse_loss(output, batch["target"], reduction="sum") * 0.05


def huber(output: Tensor, batch: dict[str, Any]) -> Tensor:
    return F.smooth_l1_loss(output, batch["target"])


def weighted(output: Tensor, batch: dict[str, Any]) -> Tensor:
    """A weight for each sample, normalised by the sum of the weights."""
    each = (output - batch["target"]).square().mean(-1)
    return (each * batch["weight"]).sum() / batch["weight"].sum()


def weighted_mean(output: Tensor, batch: dict[str, Any]) -> Tensor:
    return ((output - batch["target"]).square().mean(-1) * batch["weight"]).mean()


def logits(output: Tensor, batch: dict[str, Any]) -> Tensor:
    return F.binary_cross_entropy_with_logits(output, (batch["target"] > 0).double())


PLANS = [("ddp=2", 2, 1), ("ddp=2", 2, 2), ("fsdp=4", 4, 1), ("fsdp=4", 4, 2), ("ddp=2,tp=2", 4, 2)]


def case(model: nn.Module, loss: Loss | None = None) -> Case:
    generator = torch.Generator().manual_seed(0)

    def batch() -> dict[str, Tensor]:
        made = {"x": torch.randn(8, 5, generator=generator, dtype=torch.float64)}
        if loss is not None:
            made["target"] = torch.randn(8, 3, generator=generator, dtype=torch.float64)
        if loss in (weighted, weighted_mean):
            made["weight"] = torch.rand(8, generator=generator, dtype=torch.float64) ** 4
        return made

    return Case(model.double(), [batch() for _ in range(2)], loss=loss, clip=1.0)


@pytest.mark.parametrize("kind", [Penalised, PenaltyAlone])
@pytest.mark.parametrize(("plan", "ranks", "microbatches"), PLANS)
def test_a_term_that_does_not_depend_on_the_batch(plan: str, ranks: int, microbatches: int, kind: type[Model]) -> None:
    torch.manual_seed(0)
    assert difference(case(kind()), plan, ranks, microbatches) < 1e-11


@pytest.mark.parametrize("loss", [mse, mse_sum, huber, weighted, weighted_mean, logits])
@pytest.mark.parametrize(("plan", "ranks", "microbatches"), PLANS)
def test_losses(plan: str, ranks: int, microbatches: int, loss: Loss) -> None:
    torch.manual_seed(0)
    assert difference(case(Model(), loss), plan, ranks, microbatches) < 1e-11
