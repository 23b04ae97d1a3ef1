"""N05: the gradient norm counted wrongly (here: the clipping of dense models).

Reported: one system left parameters out of the norm or mixed unrelated ones, another let every group clip shared
weights by its own norm so that replicas drift, a third averaged local norms. Logs look normal on each rank.
https://github.com/NVIDIA/Megatron-LM/pull/5916
https://github.com/NVIDIA-NeMo/Automodel/issues/3816
https://github.com/deepspeedai/DeepSpeed/issues/8475
https://github.com/huggingface/transformers/pull/48208
"""

from __future__ import annotations

from functools import cache

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.runtime.feed import whole_batch
from tests.field.against_one_device import Case, Trained, cluster_of, copies_agree, eager, train

VOCABULARY, WIDTH = 64, 8


class Model(nn.Module):
    """Gradients of very different sizes, a tied table, a bias that is nowhere cut, a vector that nothing divides."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.up = nn.Linear(WIDTH, 20)
        self.down = nn.Linear(20, WIDTH)
        self.odd = nn.Parameter(torch.randn(3))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(tokens)
        x = x + 10 * self.down(torch.tanh(self.up(x)))
        x = x * self.odd.exp().sum()
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


@cache
def case(clip: float) -> Case:
    torch.manual_seed(0)
    model = Model().double()
    batches = [{n: torch.randint(VOCABULARY, (8, 5)) for n in ("tokens", "labels")} for _ in range(3)]
    return Case(model, batches, clip=clip)


@cache
def truth(clip: float) -> Trained:
    return eager(case(clip))


PLANS = [
    ("ddp=4", 1),
    ("zero1=4", 1),
    ("zero2=4", 2),
    ("fsdp=4", 1),
    ("tp=4", 1),
    ("fsdp=2,tp=2", 1),
    ("fsdp=2,tp=2,sp", 2),
    ("ddp=2,tp=2", 2),
]


@pytest.mark.parametrize(("plan", "microbatches"), PLANS)
def test_clips_as_one_device(plan: str, microbatches: int) -> None:
    """Clipped hard, so that a wrong norm is a wrong step for every weight."""
    cluster = cluster_of(case(1.0), plan, microbatches=microbatches)
    assert min(truth(1.0).norms) > 3
    assert train(cluster, case(1.0)).far_from(truth(1.0)) < 1e-11
    copies_agree(cluster)


@pytest.mark.parametrize(("plan", "microbatches"), PLANS)
def test_all_ranks_have_the_same_norm(plan: str, microbatches: int) -> None:
    cluster = cluster_of(case(1.0), plan, microbatches=microbatches)
    feed = whole_batch(case(1.0).batches[0], cluster.rank_program.program)
    norms = {r.norm for r in cluster.run(lambda executor: executor.step(feed, seed=0))}
    assert len(norms) == 1
    assert norms.pop() == pytest.approx(truth(1.0).norms[0], rel=1e-12)


@pytest.mark.parametrize("plan", ["fsdp=4", "fsdp=2,tp=2"])
def test_a_norm_below_the_limit_changes_nothing(plan: str) -> None:
    limit = 2 * max(eager(case(1e9)).norms)
    assert train(cluster_of(case(limit), plan), case(limit)).far_from(truth(1e9)) < 1e-11
