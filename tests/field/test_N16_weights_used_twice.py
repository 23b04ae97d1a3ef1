"""N16: a backward pass that is split in two counts a weight twice that is used twice.

Reported: where one use of a weight feeds the other, the part for the weights met what both uses had kept, and went
through it once from each.
https://github.com/pytorch/pytorch/issues/180952
https://github.com/pytorch/pytorch/pull/181365
"""

from __future__ import annotations

from collections import Counter
from functools import cache

import pytest
import torch
from torch import Tensor, nn

from meshwright.compiler.graph.pipeline_program import PipelineProgram
from meshwright.compiler.graph.rank_program import LocalGraph
from tests.field.against_one_device import Case, cluster_of, eager, train
from tests.field.stacks import WIDTH, Block, Stack, case


class Twice(nn.Module):
    """``x W W``, with something bent around it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH**0.5)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(x @ self.weight @ self.weight)


class Repeating(nn.Module):
    """A block that calls one and the same module twice."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Block()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(torch.tanh(self.inner(x)))


class Again(Stack):
    """All blocks, and all of them once more: each is used at two depths, on both sides of every cut."""

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in (*self.blocks, *self.blocks):
            x = block(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


@cache
def stack_of(make: type[nn.Module]) -> Case:
    return case(lambda: Stack(4, make))


@cache
def again() -> Case:
    return case(lambda: Again(4))


SPLIT = ("zb-h1", "zb-h2", "zb-v", "dualpipe")


@pytest.mark.parametrize("schedule", SPLIT)
@pytest.mark.parametrize("make", [Twice, Repeating])
def test_within_a_stage(make: type[nn.Module], schedule: str) -> None:
    made = stack_of(make)
    cluster = cluster_of(made, f"pp=2,schedule={schedule}", 2, 4)
    assert train(cluster, made).far_from(eager(made)) < 1e-11


@pytest.mark.parametrize("schedule", ["1f1b", *SPLIT])
def test_on_several_stages(schedule: str) -> None:
    made = again()
    cluster = cluster_of(made, f"pp=2,schedule={schedule}", 2, 4)
    assert train(cluster, made).far_from(eager(made)) < 1e-11


@pytest.mark.parametrize("make", [Twice, Repeating])
def test_both_parts_together_are_the_whole(make: type[nn.Module]) -> None:
    """Every product of the backward pass is in one of the parts, once, and every gradient comes out of one of them."""
    whole = cluster_of(stack_of(make), "ddp=1", 1, 4).rank_program.micro
    program = cluster_of(stack_of(make), "pp=2,schedule=zb-h1", 2, 4).rank_program
    assert isinstance(program, PipelineProgram)
    passes = [graph for stage in program.stages for graph in stage.passes.values()]
    expected, found = products([whole]), products(passes)
    assert len(found) == len(set(found)) == len(expected) > 0
    made = Counter(v.name.partition("@")[0] for g in passes for v in g.signature.outputs if v.kind == "gradient")
    tied = {"embed.weight": 2}  # of both stages that read it
    assert made == {p.name: tied.get(p.name, 1) for p in program.program.parameters}


def products(graphs: list[LocalGraph]) -> list[str]:
    """The products of matrices, by the names of their nodes."""
    nodes = [n for graph in graphs for n in graph.module.graph.nodes if n.op == "call_function"]
    return [n.name for n in nodes if "einsum" in str(n.target) or "mm" in str(n.target)]
