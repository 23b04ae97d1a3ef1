"""The right formulas, each proved by relations and measured against eager PyTorch on one device."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.compiler.diagnostics import MeshwrightError
from meshwright.compiler.equivalence.check import check_relations
from tests.field.against_one_device import Case, cluster_of, eager, train

VOCABULARY, WIDTH, EXPERTS = 64, 8, 4


class Tied(nn.Module):
    """A tied table, a norm's weight that all ranks have, unequal numbers of words that count."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.norm(self.embed(tokens))).flatten(0, 1), labels.flatten())


class Weighted(nn.Module):
    """A weighted mean over all words of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        each = F.cross_entropy(self.head(self.embed(tokens)).flatten(0, 1), labels.flatten(), reduction="none")
        weight = (labels.flatten() >= 0) * (1.0 + tokens.flatten() % 3)
        return (each * weight).sum() / weight.sum().clamp(min=1)


class Normalised(nn.Module):
    """Statistics of the whole batch."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.norm(self.embed(tokens).transpose(1, 2)).transpose(1, 2)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


class Balanced(nn.Module):
    """A product of means over all words of the batch: how many go to an expert, times how much its router likes it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.experts = nn.Parameter(torch.randn(EXPERTS, WIDTH, 12))
        self.head = nn.Linear(12, VOCABULARY)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(tokens)
        gates = torch.softmax(self.router(x), -1)
        chosen = F.one_hot(gates.argmax(-1), EXPERTS).to(gates.dtype)
        made = torch.einsum("bte,btd,edf->btf", gates * chosen, x, self.experts)
        balance = EXPERTS * (chosen.mean((0, 1)) * gates.mean((0, 1))).sum()
        return F.cross_entropy(self.head(made).flatten(0, 1), labels.flatten()) + 0.1 * balance


def case(make: type[nn.Module]) -> Case:
    torch.manual_seed(0)
    batches = [{n: torch.randint(VOCABULARY, (8, 6)) for n in ("tokens", "labels")} for _ in range(2)]
    for batch in batches:
        counts = torch.arange(8)[:, None] % 7
        batch["labels"] = batch["labels"].where(torch.arange(6)[None, :] < counts, -100)
    return Case(make().double(), batches, clip=0.1)


@pytest.mark.parametrize(
    ("make", "plan", "microbatches"),
    [
        (Tied, "fsdp=2,tp=2", 2),
        (Tied, "ddp=2,fsdp=2", 2),
        (Tied, "zero1=4", 1),
        (Weighted, "ddp=4", 2),
        (Weighted, "fsdp=2,tp=2", 2),
        (Normalised, "ddp=4", 1),
        (Normalised, "fsdp=4", 1),
        (Balanced, "ddp=4", 1),
        (Balanced, "fsdp=4", 1),
    ],
)
def test_formula(make: type[nn.Module], plan: str, microbatches: int) -> None:
    made = case(make)
    cluster = cluster_of(made, plan, microbatches=microbatches)
    assert check_relations(cluster.rank_program).proved
    assert train(cluster, made).far_from(eager(made)) < 1e-9


@pytest.mark.parametrize("make", [Normalised, Balanced])
def test_what_couples_samples_is_not_cut_into_microbatches(make: type[nn.Module]) -> None:
    with pytest.raises(MeshwrightError, match="E0305"):
        cluster_of(case(make), "ddp=2", ranks=2, microbatches=2)
