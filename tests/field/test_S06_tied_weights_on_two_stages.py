"""S06: an embedding that is the head too, on the first and on the last stage of a pipeline.

Reported: each stage gets a copy and updates it alone, for nobody sums the gradients before the step; the tie is lost
when weights are made after the model was on the meta device; the weight counts twice in the norm; it is saved twice;
stages in a V, whose first and last one are on one device, need no copy.
https://github.com/uw-syfi/piper/issues/13
https://github.com/NVIDIA/Megatron-LM/issues/299
https://github.com/mindspore-ai/hyper-parallel/issues/382
https://github.com/pytorch/torchtitan/pull/4486

Real processes, and what is saved, are in tests/parallel/test_pipeline_ranks.py.
"""

from __future__ import annotations

from functools import cache

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from meshwright.compiler.graph.pipeline_program import copies_of
from meshwright.compiler.graph.program import Value
from meshwright.compiler.graph.stage_messages import copies_after
from meshwright.compiler.passes.pipeline import compile_plan
from meshwright.compiler.passes.presets import preset
from meshwright.runtime.materialize import seeded
from meshwright.runtime.virtual import VirtualCluster
from tests.field.against_one_device import Case, captured, cluster_of, copies_agree, eager, train
from tests.field.stacks import Stack, case

PLANS = [
    ("pp=2", 2),
    ("pp=4,schedule=zb-h1", 4),
    ("pp=2,schedule=zb-v", 2),
    ("pp=2,schedule=dualpipe", 2),
    ("pp=2,fsdp=2", 4),
    ("pp=2,tp=2,schedule=interleaved", 4),
]
TIED = "embed.weight"


@pytest.mark.parametrize(("plan", "ranks"), PLANS)
def test_trains_as_on_one_device(plan: str, ranks: int) -> None:
    made = case(steps=3)
    cluster = cluster_of(made, plan, ranks, 4)
    assert train(cluster, made).far_from(eager(made)) < 1e-11
    copies_agree(cluster)


@pytest.mark.parametrize(("plan", "ranks"), PLANS)
def test_it_is_one_parameter_with_one_state(plan: str, ranks: int) -> None:
    cluster = cluster_of(case(), plan, ranks, 4)
    assert set(copies_of(cluster.rank_program).values()) == {TIED}
    assert set(cluster.full_parameters()) == {p.name for p in cluster.rank_program.program.parameters}
    holders = [{n for n in h.state if n.startswith(TIED)} for h in cluster.holdings]
    assert {len(names) for names in holders} == {0, len(holders[0])}, "the ranks of one stage keep it, others nothing"
    first = {cluster.mesh.coordinates(rank)["pipe"] for rank, names in enumerate(holders) if names}
    assert len(first) == 1


def test_stages_in_a_v_need_no_copy() -> None:
    """Its first and last stage are on the first rank."""
    cluster = cluster_of(case(), "pp=2,schedule=zb-v", 2, 4)
    ((copy, name),) = copies_of(cluster.rank_program).items()
    first, second = (holdings.parameters for holdings in cluster.holdings)
    assert first[copy] is first[name]
    assert copy not in second and name not in second
    assert not [moved for moved in copies_after(cluster.rank_program) if moved[0] == name]


def test_two_ranks_have_a_copy_each_and_the_second_is_given_the_new_value() -> None:
    cluster = cluster_of(case(), "pp=2", 2, 4)
    ((copy, name),) = copies_of(cluster.rank_program).items()
    assert list(copies_after(cluster.rank_program)) == [(name, 0, copy, 1)]
    assert cluster.rank_program.holders(Value("parameter", copy)) == (1,)


def test_weights_that_are_made_by_name_are_tied_too() -> None:
    """As after a model on the meta device: every rank makes its own, from a seed."""
    program = captured(case())
    weights = seeded(7, lambda name, spec, generator: torch.randn(spec.shape, generator=generator, dtype=spec.dtype))
    compiled = compile_plan(program, preset("pp=2,micro=4", program))
    cluster = VirtualCluster(compiled, weights)
    ((copy, name),) = copies_of(compiled).items()
    first, second = (holdings.parameters for holdings in cluster.holdings)
    assert torch.equal(first[name], second[copy])


class OneWay(Stack):
    """The table, or the head, is as it is: no gradient goes through it."""

    def __init__(self, still: str) -> None:
        super().__init__()
        self.still = still

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        table, head = (
            self.embed.weight.detach() if self.still == end else self.embed.weight for end in ("table", "head")
        )
        x = F.embedding(tokens, table)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(F.linear(x, head).flatten(0, 1), labels.flatten())


@cache
def one_way(still: str) -> Case:
    return case(lambda: OneWay(still))


@pytest.mark.parametrize("still", ["table", "head"])
@pytest.mark.parametrize("plan", ["pp=2", "pp=2,schedule=dualpipe", "pp=2,schedule=zb-v"])
def test_an_end_without_a_gradient_gets_the_new_value_too(plan: str, still: str) -> None:
    made = one_way(still)
    cluster = cluster_of(made, plan, 2, 4)
    assert train(cluster, made).far_from(eager(made)) < 1e-11
    copies_agree(cluster)
