"""N11: dropout masks that are the same where they must differ, and differ where they must be the same.

Reported: masks of activations that all tensor ranks hold must be alike on them and differ between data ranks, those of
cut activations must differ between tensor ranks too; found were one seed for all devices, a seed for each device
everywhere, and stages of a pipeline with one seed.
https://github.com/tenstorrent/tt-metal/issues/55947
https://github.com/ecmwf/anemoi-core/issues/595
https://github.com/awslabs/slapo/issues/21
https://github.com/pytorch/torchtitan/pull/689

The mask of one process is the truth: element by element, on every mesh.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.field.against_one_device import Case, cluster_of, eager, train

SAMPLES, WIDTH, INNER = 8, 8, 16
PLANS = ["ddp=2,tp=2", "fsdp=2,tp=2", "tp=4", "ddp=4", "pp=2,tp=2", "pp=2,fsdp=2"]


class Block(nn.Module):
    """A cut activation is dropped between the products, a whole one after them."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, INNER)
        self.down = nn.Linear(INNER, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        inner = F.dropout(torch.relu(self.up(x)), 0.5)
        return x + F.dropout(self.down(inner), 0.5)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return (x**2).mean()


class Shown(nn.Module):
    """The gradient of ``whole`` is the mask after a row-parallel product, that of ``cut`` the one before it."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, INNER)
        self.down = nn.Linear(INNER, WIDTH)
        self.cut = nn.Parameter(torch.zeros(SAMPLES, INNER))
        self.whole = nn.Parameter(torch.zeros(SAMPLES, WIDTH))

    def forward(self, x: Tensor, number: Tensor) -> Tensor:
        inner = F.dropout(torch.relu(self.up(x)) + self.cut[number], 0.5)
        return F.dropout(self.down(inner) + self.whole[number], 0.5).sum()


def case(model: nn.Module, **more: Tensor) -> Case:
    batches = [{"x": torch.randn(SAMPLES, WIDTH, dtype=torch.float64), **more} for _ in range(2)]
    return Case(model.double(), batches, seed=5)


@pytest.mark.parametrize("plan", PLANS)
def test_every_mesh_trains_as_one_process(plan: str) -> None:
    torch.manual_seed(0)
    made = case(Model())
    microbatches = 2 if plan.startswith("pp") else 1
    assert train(cluster_of(made, plan, microbatches=microbatches), made).far_from(eager(made)) < 1e-11


@pytest.mark.parametrize("plan", ["ddp=2,tp=2", "tp=4", "ddp=4"])
def test_the_masks_are_those_of_one_process(plan: str) -> None:
    torch.manual_seed(0)
    made = case(Shown(), number=torch.arange(SAMPLES))
    found = train(cluster_of(made, plan), made).gradients[0]
    truth = eager(made).gradients[0]
    mask = found["whole"]
    assert set(mask.unique().tolist()) == {0.0, 2.0}
    assert torch.equal(mask, truth["whole"])
    # samples of different data ranks, and columns of different tensor ranks, have masks of their own
    assert len({tuple(row) for row in mask.tolist()}) == SAMPLES
    torch.testing.assert_close(found["cut"], truth["cut"], rtol=1e-12, atol=1e-12)
    dropped = found["cut"].eq(0)
    assert not torch.equal(dropped[:, : INNER // 2], dropped[:, INNER // 2 :])
