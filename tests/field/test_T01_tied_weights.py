"""T01: tied embedding and output head in a joint capture of forward and backward.

Reported: capturing both together failed where the head reuses the embedding's weight, or the shared weight kept
only one of its names, so that rules by name met the wrong layer.
https://github.com/pytorch/pytorch/issues/147380
https://github.com/huggingface/transformers/issues/47979
https://github.com/pytorch/pytorch/pull/160600
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.compiler.mesh import Mesh, parse_sharding
from meshwright.compiler.passes.layouts import layouts
from meshwright.compiler.plan import ParameterPlan, Plan
from tests.field.against_one_device import Case, captured, difference, eager

VOCABULARY, DIM = 11, 8


class Tied(nn.Module):
    """Embedding, one block, a head that is the embedding. The loss is a sum over tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, DIM)
        self.up = nn.Linear(DIM, 12)
        self.down = nn.Linear(12, DIM)
        self.head = nn.Linear(DIM, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        x = x + self.down(torch.tanh(self.up(x)))
        return F.cross_entropy(self.head(x[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum")


def two_groups(model: nn.Module) -> torch.optim.Optimizer:
    """The shared weight is given by its second name, in a group of its own."""
    shared = model.get_submodule("head").weight
    others = [p for p in model.parameters() if p is not shared]
    return torch.optim.AdamW(
        [{"params": others}, {"params": [shared], "lr": 3e-2, "weight_decay": 0.3}], lr=1e-2, weight_decay=0.0
    )


def case() -> Case:
    torch.manual_seed(0)
    model = Tied().double()
    batches = [{"tokens": torch.randint(VOCABULARY, (8, 5))} for _ in range(3)]
    return Case(model, batches, optimizer=two_groups, clip=1.0)


def test_one_parameter_with_two_names_and_one_gradient() -> None:
    program = captured(case())
    shared = program.parameter("embed.weight")
    assert shared is program.parameter("head.weight")
    assert {shared.name, *shared.aliases} == {"embed.weight", "head.weight"}
    assert [p.name for p in program.parameters if p.spec.shape == (VOCABULARY, DIM)] == [shared.name]
    gradients = [v for v in program.micro.signature.outputs if v.kind == "gradient" and v.name == shared.name]
    assert len(gradients) == 1


def test_the_optimizer_has_one_copy_in_the_group_of_either_name() -> None:
    program = captured(case())
    shared = program.parameter("embed.weight")
    assert shared.group == 1
    moments = [n for n in program.state if n.rpartition("/")[2] == "exp_avg"]
    assert len(moments) == len(program.parameters) == 5


@pytest.mark.parametrize(
    ("plan", "microbatches"), [("ddp=4", 1), ("zero1=4", 2), ("fsdp=4", 1), ("fsdp=4", 2), ("fsdp=2,tp=2", 1)]
)
def test_trains_as_on_one_device(plan: str, microbatches: int) -> None:
    assert difference(case(), plan, microbatches=microbatches) < 1e-11


@pytest.mark.parametrize("name", ["embed.weight", "head.weight", "head.*"])
@pytest.mark.parametrize("cut", ["[11@tensor, 8]", "[11, 8@tensor]"])
def test_a_plan_reaches_it_by_either_name(name: str, cut: str) -> None:
    """Cut along the vocabulary or the features: the table and the head are cut together."""
    made = case()
    program = captured(made)
    plan = Plan(
        Mesh((("replica", 2), ("tensor", 2))),
        batch=("replica",),
        parameters=(ParameterPlan(name, parse_sharding(cut)),),
    )
    assert layouts(program, plan)[program.parameter("embed.weight").name].compute == parse_sharding(cut)
    assert difference(made, plan) < 1e-11
    assert difference(made, replace(plan, microbatches=2)) < 1e-11


def test_the_gradient_is_the_sum_of_both_uses() -> None:
    """Eager's gradient of an untied copy, use by use, adds up to the one gradient of the tied one."""
    made = case()
    untied = case().model
    untied.head.weight = nn.Parameter(untied.embed.weight.detach().clone())
    apart = eager(Case(untied, made.batches[:1])).gradients[0]
    together = eager(Case(made.model, made.batches[:1])).gradients[0]["embed.weight"]
    torch.testing.assert_close(apart["embed.weight"] + apart["head.weight"], together, rtol=1e-12, atol=1e-12)
    assert min(float(apart[n].abs().max()) for n in ("embed.weight", "head.weight")) > 1e-3
