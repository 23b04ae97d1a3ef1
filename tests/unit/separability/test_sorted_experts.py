"""Rows sorted by expert: no coupling where the sort only orders them, and one where anything hangs on their places.

The truth is eager PyTorch on one device. It has no grouped product in float64, so the truth of models that drop nothing
is the same mixture without a sort, which some of them are shown to equal as they stand.
"""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import meshwright
from meshwright.compiler.diagnostics import MeshwrightError
from meshwright.compiler.equivalence.check import check_relations
from meshwright.compiler.graph.rank_program import RankProgram
from meshwright.compiler.passes import separability
from meshwright.compiler.passes.presets import preset
from meshwright.frontend.capture import capture
from meshwright.miniature import verify_miniature
from tests.field.against_one_device import Case, Trained, cluster_of, eager, train
from tests.unit.separability.experts import (
    DROPPED,
    KEPT,
    WIDTH,
    AddedBack,
    Grouped,
    GroupedBalanced,
    GroupedByCount,
    Plain,
    PlainBalanced,
)

PLANS = [("ddp=2,micro=2", 2), ("fsdp=2,micro=4,prefetch", 2)]


def case(model: type[nn.Module]) -> Case:
    torch.manual_seed(0)
    batches = [{name: torch.randn(8, 3, WIDTH, dtype=torch.float64) for name in ("x", "target")} for _ in range(2)]
    return Case(model().double(), batches, clip=0.5)


def truth(one: Case, model: type[nn.Module] = Plain) -> Trained:
    plain = model().double()
    plain.load_state_dict(one.model.state_dict())
    return eager(Case(plain, one.batches, clip=one.clip))


def sorts(one: Case) -> int:
    return sum("sort" in str(n.target) for n in one.program.micro.module.graph.nodes)


@pytest.mark.parametrize("model", KEPT)
def test_what_drops_nothing_couples_nothing(model: type[nn.Module]) -> None:
    one = case(model)
    assert separability.findings(one.program) == () and not sorts(one)
    wanted = truth(one)
    for plan, ranks in PLANS:
        cluster = cluster_of(one, preset(plan, one.program, ranks))
        assert isinstance(cluster.rank_program, RankProgram) and check_relations(cluster.rank_program).proved
        assert train(cluster, one).far_from(wanted) < 1e-9


@pytest.mark.parametrize(("plan", "ranks"), [("ddp=3", 3), ("fsdp=3,micro=2", 3)])
def test_unlike_numbers_of_tokens_on_ranks(plan: str, ranks: int) -> None:
    """Padding is sorted along, and counts for nothing."""
    one = case(GroupedByCount)
    assert train(cluster_of(one, preset(plan, one.program, ranks)), one).far_from(truth(one)) < 1e-9


def test_a_balance_loss_beside_them_is_all_that_couples() -> None:
    one = case(GroupedBalanced)
    assert [found.code for found in separability.findings(one.program)] == ["E0761"]
    wanted = truth(one, PlainBalanced)
    for plan, ranks in (("ddp=3", 3), ("fsdp=3,micro=2,separability=global", 3)):
        assert train(cluster_of(one, preset(plan, one.program, ranks)), one).far_from(wanted) < 1e-9


@pytest.mark.parametrize("model", [m for m in KEPT if not issubclass(m, Grouped)])
def test_the_truth_is_that_of_the_models_themselves(model: type[nn.Module]) -> None:
    one = case(model)
    assert eager(one).far_from(truth(one)) < 1e-12


@pytest.mark.parametrize("model", DROPPED)
def test_what_hangs_on_places_stays_a_coupling(model: type[nn.Module]) -> None:
    one = case(model)
    assert "E0763" in {found.code for found in separability.findings(one.program)} and sorts(one)
    with pytest.raises(MeshwrightError) as caught:
        cluster_of(one, preset("ddp=2,micro=2", one.program))
    assert caught.value.diagnostics[0].code == "E0305"


@pytest.mark.parametrize("model", [m for m in DROPPED if not issubclass(m, Grouped)])
def test_a_token_gets_something_else_beside_others(model: type[nn.Module]) -> None:
    """So that the verdicts above could be wrong: half of a batch alone gives other numbers than within the whole."""
    one = case(model)

    def routed(some: slice) -> torch.Tensor:
        rows = one.batches[0]["x"][some].reshape(-1, WIDTH)
        gate, chosen = one.model.router(rows).softmax(-1).topk(2, -1)
        made: torch.Tensor = one.model.route(rows, gate, chosen)
        return made

    assert not torch.allclose(routed(slice(0, 8))[:12], routed(slice(0, 4)))
    plain = Case(copy.deepcopy(one.model), one.batches)
    plain.model.__class__ = AddedBack
    one = plain
    assert torch.allclose(routed(slice(0, 8))[:12], routed(slice(0, 4)))


class Rows(nn.Module):
    """What each token gets."""

    def __init__(self, experts: nn.Module) -> None:
        super().__init__()
        self.experts = experts

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.reshape(-1, WIDTH)
        gate, chosen = self.experts.router(rows).softmax(-1).topk(2, -1)
        made: torch.Tensor = self.experts.route(rows, gate, chosen)
        return made.reshape(x.shape)


@pytest.mark.parametrize(
    "model",
    [pytest.param(m, marks=pytest.mark.slow if number % 2 else ()) for number, m in enumerate((*KEPT, *DROPPED))],
)
def test_the_checker_of_causality_says_the_same(model: type[nn.Module]) -> None:
    """It looks at the values of a run, element by element, and knows nothing of how the step is written anew."""
    torch.manual_seed(0)
    found = meshwright.check(Rows(model()), torch.randn(2, 12, WIDTH))
    assert ("batch" in found.leaks) == (model in DROPPED)


@pytest.mark.parametrize("model", [Grouped, AddedBack])
def test_the_miniature_of_a_large_plan_is_small(model: type[nn.Module]) -> None:
    torch.manual_seed(0)
    batch = {name: torch.randn(256, 3, WIDTH, dtype=torch.float64) for name in ("x", "target")}
    one = Case(model().double(), [batch])
    found, small = verify_miniature(one.program, preset("fsdp=64,micro=2", one.program, 64), steps=1)
    assert small.plan.mesh.ranks == 2 and small.program.batch_size < 32
    assert found.passed and found.worst < 1e-12


def test_numbers_beyond_the_bins_are_told() -> None:
    one = case(GroupedByCount)
    ours = torch.ops.meshwright
    assert ours.count(torch.tensor([2, 0, 2, -1]), 3).tolist() == [1, 0, 2]
    with pytest.raises(MeshwrightError) as caught:
        ours.count(torch.tensor([2, 0, 2]), 2)
    assert caught.value.diagnostics[0].code == "E0778"
    assert any("routed_mm" in str(n.target) for n in one.program.micro.module.graph.nodes)


class ByBatch(nn.Module):
    """Experts that the batch names, of which nothing is known: their rows stay grouped as they are."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(4, WIDTH, WIDTH))

    def forward(self, x: torch.Tensor, expert: torch.Tensor) -> torch.Tensor:
        keys, order = expert.sort()
        ends = torch.bincount(keys, minlength=4).cumsum(0).to(torch.int32)
        made = torch.nn.functional.grouped_mm(x[order], self.w, offs=ends)
        return torch.zeros_like(x).index_add(0, order, made).square().mean()


def test_keys_that_may_be_anything_stay_sorted() -> None:
    """Groups are counted from 0 on; rows of a negative key would belong to none and move all the others."""
    batch = {"x": torch.randn(8, WIDTH), "expert": torch.randint(4, (8,))}
    model = ByBatch()
    program = capture(model, batch, torch.optim.SGD(model.parameters(), lr=0.1))
    assert "E0763" in {found.code for found in separability.findings(program)}
