"""E02: recomputation routes tokens differently from the forward pass.

Reported: near-ties flip a top-k that is computed again, counts change by one, and the backward pass fails.
https://github.com/pytorch/torchtitan/issues/1117
https://github.com/NVIDIA-NeMo/Automodel/pull/2635
https://github.com/NVIDIA-NeMo/Automodel/issues/3325
https://github.com/NVIDIA-NeMo/RL/issues/1203
https://github.com/ByteDance-Seed/VeOmni/issues/979
"""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import Tensor, nn

from meshwright.compiler.equivalence.check import check_relations
from meshwright.compiler.graph.program import annotation
from tests.field.against_one_device import Case, cluster_of, eager, train
from tests.field.stacks import INNER, WIDTH, Stack, case

EXPERTS = 4
CHOICES = ("topk", "sort", "argmax", "argsort", "max.dim")


class Experts(nn.Module):
    """Each word goes to two of four experts, between which its router does not choose: all logits are equal."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS)
        nn.init.zeros_(self.router.weight)
        nn.init.zeros_(self.router.bias)
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, INNER) / WIDTH**0.5)
        self.down = nn.Parameter(torch.randn(EXPERTS, INNER, WIDTH) / INNER**0.5)

    def forward(self, x: Tensor) -> Tensor:
        gates = torch.softmax(self.router(x), -1)
        weights, chosen = gates.topk(2, -1)
        mask = torch.zeros_like(gates).scatter(-1, chosen, weights)
        made = torch.einsum("btef,efd->bted", torch.tanh(torch.einsum("btd,edf->btef", x, self.up)), self.down)
        return x + (mask[..., None] * made).sum(-2)


@cache
def tied() -> Case:
    return case(lambda: Stack(4, Experts))


@pytest.mark.parametrize(
    ("plan", "ranks"), [("fsdp=2,recompute", 2), ("fsdp=2,tp=2,recompute", 4), ("fsdp=2,selective", 2)]
)
def test_choices_are_made_once(plan: str, ranks: int) -> None:
    made = tied()
    cluster = cluster_of(made, plan, ranks)
    nodes = [n for graph in cluster.rank_program.micro_graphs for n in graph.module.graph.nodes]
    assert any(annotation(n).recomputed for n in nodes)
    chosen = [n for n in nodes if any(f"aten.{word}" in str(n.target) for word in CHOICES)]
    assert len(chosen) == 4
    assert not any(annotation(n).recomputed for n in chosen)
    assert check_relations(cluster.rank_program).proved
    assert train(cluster, made).far_from(eager(made)) < 1e-9
