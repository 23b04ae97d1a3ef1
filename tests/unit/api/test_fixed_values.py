"""Numbers in a batch are a part of the program; others are refused instead of being ignored."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import meshwright
from meshwright.compiler.diagnostics import MeshwrightError


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x: Tensor, scale: float) -> Tensor:
        return (self.linear(x) * scale).sum()


def test_another_number_is_refused() -> None:
    model = Scaled()
    batch = {"x": torch.ones(4, 3), "scale": 2.0}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = meshwright.parallelize(model, optimizer=optimizer, batch=batch, plan="ddp=2", virtual=2)
    step(batch)
    with pytest.raises(MeshwrightError, match=r"'scale' of the batch is 3.0; the step was compiled for 2.0"):
        step({**batch, "scale": 3.0})
