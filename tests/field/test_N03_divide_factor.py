"""N03: the factor by which gradients are divided depends on the mesh.

Reported: versions that scaled the loss but reduced over another group gave gradients off by that factor; a divide
factor set by the user was applied differently for one-dimensional and two-dimensional sharded data parallelism.
https://github.com/NVIDIA/Megatron-LM/issues/673
https://github.com/NVIDIA/Megatron-LM/issues/906
https://github.com/pytorch/pytorch/issues/155903

A linear model, whose gradient is known in closed form: no framework is needed to say what is right.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from meshwright.compiler.mesh import Mesh, parse_sharding
from meshwright.compiler.passes.presets import preset
from meshwright.compiler.plan import ParameterPlan, Plan, Storage
from tests.field.against_one_device import Batch, Case, captured, cluster_of, train

SAMPLES, INPUTS, OUTPUTS, RATE, STEPS = 8, 6, 4, 0.3, 3


class Linear(nn.Module):
    """``mean((x w' - y)^2)`` or the sum."""

    def __init__(self, mean: bool) -> None:
        super().__init__()
        self.mean = mean
        self.weight = nn.Parameter(torch.randn(OUTPUTS, INPUTS, dtype=torch.float64))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        error = (x @ self.weight.T - y) ** 2
        return error.mean() if self.mean else error.sum() * 0.01


def case(mean: bool) -> Case:
    torch.manual_seed(0)
    model = Linear(mean)
    batches = [
        {
            "x": torch.randn(SAMPLES, INPUTS, dtype=torch.float64),
            "y": torch.randn(SAMPLES, OUTPUTS, dtype=torch.float64),
        }
        for _ in range(STEPS)
    ]
    return Case(model, batches, optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=RATE))


def gradient(weight: Tensor, batch: Batch, mean: bool) -> Tensor:
    """In closed form."""
    factor = 2 / (SAMPLES * OUTPUTS) if mean else 0.02
    return factor * (batch["x"] @ weight.T - batch["y"]).T @ batch["x"]


def by_hand(cut: str, **storage: tuple[str, ...]) -> Plan:
    """Two ranks cut the batch and two the weight."""
    return Plan(
        Mesh((("data", 2), ("tensor", 2))),
        batch=("data",),
        storage=Storage(**storage),
        parameters=(ParameterPlan("weight", parse_sharding(cut)),),
    )


PLANS: dict[str, str | Plan] = {
    **{p: p for p in ("ddp=4", "zero1=4", "zero2=4", "fsdp=4", "ddp=2,fsdp=2", "ddp=2,zero2=2")},
    "ddp=2, outputs cut by 2": by_hand("[4@tensor, 6]"),
    "ddp=2, inputs cut by 2": by_hand("[4, 6@tensor]"),
    "fsdp=2, inputs cut by 2": by_hand("[4, 6@tensor]", parameters=("data",), gradients=("data",), state=("data",)),
}


@pytest.mark.parametrize("mean", [True, False])
@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("plan", PLANS)
def test_every_mesh_makes_the_known_update(plan: str, microbatches: int, mean: bool) -> None:
    made = case(mean)
    how = PLANS[plan]
    if isinstance(how, str):
        how = preset(how, captured(made), 4)
    found = train(cluster_of(made, replace(how, microbatches=microbatches)), made)
    weight = made.model.get_parameter("weight").detach().clone()
    for step, batch in enumerate(made.batches):
        right = gradient(weight, batch, mean)
        torch.testing.assert_close(found.gradients[step]["weight"], right, rtol=1e-12, atol=1e-13)
        weight = weight - RATE * right
        torch.testing.assert_close(found.weights[step]["weight"], weight, rtol=1e-12, atol=1e-13)
