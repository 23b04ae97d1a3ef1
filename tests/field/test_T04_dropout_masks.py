"""T04: recompute draws fresh random numbers, so backward uses another dropout mask.

Reported: when a random op was moved into the recomputed part of backward, the second draw was not tied to the
first, and gradients were wrong without any error.
https://github.com/pytorch/pytorch/issues/190758
https://github.com/pytorch/pytorch/issues/190717
https://github.com/pytorch/pytorch/issues/135459

Here a mask is a function of the step's key, the site and the global element: whoever computes it again gets
the same one, on every mesh and for every number of microbatches.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.field.against_one_device import Case, cluster_of, eager, train

SAMPLES, WIDTH = 12, 4
PLANS = ["ddp=4", "fsdp=4", "zero2=4", "ddp=2,fsdp=2"]


class Telling(nn.Module):
    """A loss in which each kept element sets a bit of its own, so that the loss tells what forward dropped.

    Element i of the activations is a parameter of the value 2^i; dropout(0.5) makes it 0 or 2^(i+1).
    """

    def __init__(self, recompute: bool) -> None:
        super().__init__()
        self.recompute = recompute
        self.table = nn.Embedding(SAMPLES, WIDTH)
        with torch.no_grad():
            self.table.weight.copy_(2.0 ** torch.arange(SAMPLES * WIDTH).reshape(SAMPLES, WIDTH))

    def forward(self, sample: Tensor) -> Tensor:
        x = self.table(sample)
        if self.recompute:
            return checkpoint(lambda y: F.dropout(y, 0.5), x, use_reentrant=False).sum()
        return F.dropout(x, 0.5).sum()


class Net(nn.Module):
    """Linear, dropout, Linear; with ``recompute`` the three are computed again in backward."""

    def __init__(self, recompute: bool) -> None:
        super().__init__()
        self.recompute = recompute
        self.first = nn.Linear(WIDTH, 16)
        self.drop = nn.Dropout(0.5)
        self.second = nn.Linear(16, 3)

    def body(self, x: Tensor) -> Tensor:
        return self.second(self.drop(torch.tanh(self.first(x))))

    def forward(self, x: Tensor) -> Tensor:
        made = checkpoint(self.body, x, use_reentrant=False) if self.recompute else self.body(x)
        return (made**2).sum()


def telling(recompute: bool) -> Case:
    return Case(Telling(recompute).double(), [{"sample": torch.arange(SAMPLES)}] * 2, seed=3)


def net(recompute: bool) -> Case:
    torch.manual_seed(0)
    model = Net(recompute).double()
    batches = [{"x": torch.randn(SAMPLES, WIDTH, dtype=torch.float64)} for _ in range(2)]
    return Case(model, batches, seed=3, clip=1.0)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("microbatches", [1, 3])
@pytest.mark.parametrize("plan", PLANS)
def test_backward_is_zero_exactly_where_forward_dropped(plan: str, microbatches: int, recompute: bool) -> None:
    cluster = cluster_of(telling(recompute), plan, microbatches=microbatches)
    loss = cluster.step({"sample": torch.arange(SAMPLES)}).loss
    kept = [bool(int(loss) >> (i + 1) & 1) for i in range(SAMPLES * WIDTH)]
    assert 0 < sum(kept) < len(kept)
    (gradient,) = cluster.full_gradients().values()
    assert gradient.flatten().tolist() == [2.0 if k else 0.0 for k in kept]


def test_every_mesh_and_microbatch_count_draws_the_same_masks() -> None:
    losses = {
        cluster_of(telling(False), plan, microbatches=m).step({"sample": torch.arange(SAMPLES)}).loss
        for plan in PLANS
        for m in (1, 3)
    }
    assert len(losses) == 1


def test_the_next_step_draws_other_masks() -> None:
    losses = train(cluster_of(telling(False), "ddp=4"), telling(False)).losses
    assert int(losses[0]) != int(losses[1])


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize(
    ("plan", "microbatches"), [("ddp=4", 1), ("fsdp=4", 3), ("ddp=2,tp=2", 1), ("fsdp=2,tp=2", 3), ("tp=4", 1)]
)
def test_trains_as_on_one_device(plan: str, microbatches: int, recompute: bool) -> None:
    """Truth is without recompute: in eager PyTorch the masks of the counter would not reach the second forward."""
    made = net(recompute)
    assert train(cluster_of(made, plan, microbatches=microbatches), made).far_from(eager(net(False))) < 1e-11
