"""E01: routing that looks at later tokens.

Reported: experts choose their tokens by comparing across the sequence, so that later tokens change what earlier ones
get; training looks good, and generation cannot do the same.
https://github.com/piotrpiekos/MoSA/issues/3
https://github.com/Shwai-He/MEO/issues/2
https://github.com/raymin0223/mixture_of_recursions/issues/11

Here: whose leak it is. The model's own is there on one device; a plan adds none, for what its ranks compute is proved
to be what the model computes.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.compiler.equivalence.check import check_relations
from tests.field.against_one_device import Case, cluster_of, eager, train

VOCABULARY, WIDTH, EXPERTS, TIME = 16, 8, 2, 8
CAPACITY = 4


class ExpertChoice(nn.Module):
    """Each expert takes the four tokens of a sample that it likes best."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.experts = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def hidden(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        gates = torch.softmax(self.router(x), -1)
        best = gates.transpose(1, 2).topk(CAPACITY, -1)
        taken = F.one_hot(best.indices, TIME).to(x.dtype)
        mine = torch.einsum("bect,btd->becd", taken, x)
        made = torch.tanh(torch.einsum("becd,edf->becf", mine, self.experts)) * best.values[..., None]
        return x + torch.einsum("bect,becf->btf", taken, made)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.hidden(tokens)).flatten(0, 1), labels.flatten())


def case() -> Case:
    torch.manual_seed(0)
    batches = [{n: torch.randint(VOCABULARY, (8, TIME)) for n in ("tokens", "labels")} for _ in range(2)]
    return Case(ExpertChoice().double(), batches)


@torch.no_grad()
def test_the_model_leaks_on_one_device() -> None:
    made = case()
    tokens = made.batches[0]["tokens"]
    model = made.model
    assert isinstance(model, ExpertChoice)
    changed = [
        float((model.hidden(torch.cat([tokens[:, :-1], last], 1)) - model.hidden(tokens))[:, :-1].abs().max())
        for last in (torch.full((8, 1), token) for token in range(VOCABULARY))
    ]
    assert max(changed) > 1e-3


@pytest.mark.parametrize("plan", ["ddp=4", "ddp=2,fsdp=2"])
def test_a_plan_adds_no_leak(plan: str) -> None:
    made = case()
    cluster = cluster_of(made, plan)
    assert check_relations(cluster.rank_program).proved
    assert train(cluster, made).far_from(eager(made)) < 1e-9
