"""E04: gradients of experts doubled, or averaged over the wrong group.

Reported: with experts cut over two ranks their gradients are exactly twice as large, while loss curves look the same:
Adam hides a constant factor.
https://github.com/pytorch/pytorch/issues/160285
https://github.com/pytorch/torchtitan/pull/1324
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.compiler.equivalence.check import check_relations
from meshwright.compiler.mesh import Mesh, parse_sharding
from meshwright.compiler.passes.pipeline import compile_plan
from meshwright.compiler.plan import ParameterPlan, Plan, Storage
from tests.equivalence.editing import micro, output, scaled
from tests.field.against_one_device import Case, cluster_of, eager, train

VOCABULARY, WIDTH, EXPERTS = 16, 8, 4


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.experts = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(tokens)
        gates = torch.softmax(self.router(x), -1)
        kept = gates * (gates >= gates.topk(2, -1).values[..., -1:])
        x = x + torch.einsum("bte,btd,edf->btf", kept, x, self.experts)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def case() -> Case:
    torch.manual_seed(0)
    batches = [{n: torch.randint(VOCABULARY, (8, 5)) for n in ("tokens", "labels")} for _ in range(2)]
    return Case(Model().double(), batches)


EXPERTS_CUT = Plan(
    Mesh((("data", 2), ("expert", 2))),
    batch=("data",),
    storage=Storage(("data",), ("data",), ("data",)),
    parameters=(ParameterPlan("experts", parse_sharding(f"[{EXPERTS}@expert, {WIDTH}, {WIDTH}]")),),
)
OVER_THE_DATA = replace(
    EXPERTS_CUT,
    batch=("data", "expert"),
    storage=Storage(),
)
"""Experts lie over an axis that cuts the batch as well, so that every token goes to all of them."""


@pytest.mark.parametrize("plan", [EXPERTS_CUT, OVER_THE_DATA, replace(EXPERTS_CUT, microbatches=2)])
def test_raw_gradients_are_those_of_one_device(plan: Plan) -> None:
    made = case()
    cluster = cluster_of(made, plan)
    assert check_relations(cluster.rank_program).proved
    got, truth = train(cluster, made), eager(made)
    assert got.far_from(truth) < 1e-9
    assert "experts" in got.gradients[0]


def test_twice_the_gradient_is_told() -> None:
    compiled = compile_plan(case().program, EXPERTS_CUT)
    graph = micro(compiled)
    at = next(i for i in range(9) if output(graph, "gradient", i)[0].name == "experts")
    scaled(graph, output(graph, "gradient", at)[1], 2.0)
    found = check_relations(compiled).findings
    assert found
    assert "mul" in found[0].node or "experts" in found[0].message
