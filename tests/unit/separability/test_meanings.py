"""Steps whose samples couple, cut into microbatches: the meaning that is declared is the one that is computed.

The truth is eager PyTorch: of the model itself where all is global, of the model whose groups are written out else.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from meshwright.compiler.diagnostics import MeshwrightError
from meshwright.compiler.graph.meeting import meeting_places
from meshwright.compiler.graph.rank_program import RankProgram
from meshwright.compiler.passes.pipeline import compile_plan
from meshwright.compiler.passes.presets import preset
from meshwright.runtime.materialize import from_module
from meshwright.verification import verify
from tests.field.against_one_device import Case, cluster_of, eager, train
from tests.field.test_batch_norm import classifier
from tests.field.test_N15_contrastive_loss import case as contrastive
from tests.unit.separability.models import Capacity, Deep, RootOfMean, case, coupled

GLOBAL = [
    ("ddp=2,micro=2", 2),
    pytest.param("fsdp=2,micro=4,prefetch", 2, marks=pytest.mark.slow),
    ("fsdp=2,tp=2,micro=2", 4),
    pytest.param("ddp=1,micro=8", 1, marks=pytest.mark.slow),
]


def far(one: Case, plan: str, ranks: int, truth: Case) -> float:
    """How far a case, as a preset says, is from the truth."""
    return train(cluster_of(one, preset(plan, one.program, ranks)), one).far_from(eager(truth))


@pytest.mark.parametrize(("plan", "ranks"), GLOBAL)
def test_global(plan: str, ranks: int) -> None:
    assert far(coupled(), f"{plan},separability=global", ranks, coupled()) < 1e-11


@pytest.mark.parametrize("model", [Capacity, RootOfMean])
def test_global_of_other_kinds(model: type) -> None:
    one = case(model())
    assert far(one, "ddp=2,micro=2,separability=global", 2, one) < 1e-11


@pytest.mark.parametrize(
    ("plan", "ranks", "groups"),
    [
        ("ddp=2,micro=2", 2, 2),
        ("fsdp=2,micro=4,prefetch", 2, 4),
        ("fsdp=2,tp=2,micro=2", 4, 2),
        ("ddp=1,micro=8", 1, 8),
    ],
)
def test_per_microbatch(plan: str, ranks: int, groups: int) -> None:
    assert far(coupled(), f"{plan},separability=per-microbatch", ranks, coupled(groups)) < 1e-10


@pytest.mark.parametrize(
    ("plan", "ranks", "groups"),
    [("ddp=2,micro=2", 2, 4), ("fsdp=4,micro=2", 4, 8), ("ddp=2,fsdp=2", 4, 4), ("fsdp=2,tp=2,micro=2", 4, 4)],
)
def test_per_data_rank(plan: str, ranks: int, groups: int) -> None:
    assert far(coupled(), f"{plan},separability=per-data-rank", ranks, coupled(groups)) < 1e-10


def test_the_meanings_are_not_the_same() -> None:
    """So that the tests above could fail."""
    assert far(coupled(), "ddp=2,micro=2,separability=global", 2, coupled(2)) > 1e-3
    assert far(coupled(), "ddp=2,micro=2,separability=per-microbatch", 2, coupled()) > 1e-3


def test_what_is_weaker_needs_no_meeting() -> None:
    program = coupled().program
    counts = {}
    for word in ("global", "per-microbatch", "per-data-rank"):
        compiled = compile_plan(program, preset(f"ddp=2,micro=2,separability={word}", program))
        assert isinstance(compiled, RankProgram)
        counts[word] = len(meeting_places(compiled.micro.module.graph))
    assert counts["global"] >= 5
    assert counts["per-microbatch"] == counts["per-data-rank"] == 0


def refused(one: Case, plan: str, ranks: int = 2) -> tuple[str, str, str]:
    with pytest.raises(MeshwrightError) as caught:
        cluster_of(one, preset(plan, one.program, ranks))
    (found,) = caught.value.diagnostics
    return found.code, found.message, found.action


def test_what_nothing_is_declared_of_is_refused_and_the_way_told() -> None:
    code, _, action = refused(classifier(), "ddp=2,micro=2")
    assert code == "E0305" and "microbatches = 1" in action and "separability" in action


class Counts(nn.Module):
    """A balance loss of counts in whole numbers, of ``groups`` groups of the batch."""

    def __init__(self, groups: int = 1) -> None:
        super().__init__()
        self.groups = groups
        self.router = nn.Linear(5, 4)

    def forward(self, x: Tensor) -> Tensor:
        p = self.router(x).softmax(-1)
        chosen = nn.functional.one_hot(p.argmax(-1), 4).reshape(self.groups, -1, 4)
        counts = chosen.sum(1) * self.groups
        return p.square().mean() + (counts.sqrt() * p.reshape(self.groups, -1, 4).mean(1)).sum(-1).mean()


@pytest.mark.parametrize(("word", "groups"), [("global", 1), ("per-microbatch", 2), ("per-data-rank", 4)])
def test_counts_stay_whole_numbers(word: str, groups: int) -> None:
    one = case(Counts())
    truth = Case(Counts(groups).double(), one.batches)
    truth.model.load_state_dict(one.model.state_dict())
    assert far(one, f"ddp=2,micro=2,separability={word}", 2, truth) < 1e-11


def test_samples_of_other_groups_cannot_be_had() -> None:
    code, _, action = refused(contrastive(8), "ddp=2,micro=2,separability=per-microbatch")
    assert code == "E0767" and action == "declare it global"


def test_groups_are_of_equal_size() -> None:
    assert refused(coupled(), "ddp=3,separability=per-data-rank", 3)[0] == "E0767"


def test_each_microbatch_of_a_pipeline_may_stand_for_the_batch() -> None:
    torch.manual_seed(0)
    one = case(Deep())
    truth = Case(Deep(2).double(), one.batches)
    truth.model.load_state_dict(one.model.state_dict())
    assert far(one, "pp=2,ddp=1,micro=2,separability=per-microbatch", 2, truth) < 1e-11


@pytest.mark.parametrize("word", ["global", "per-microbatch", "per-data-rank"])
def test_verification_compares_with_what_is_declared(word: str) -> None:
    one = coupled()
    compiled = compile_plan(one.program, preset(f"fsdp=2,micro=2,separability={word}", one.program))
    found = verify(compiled, from_module(one.model), one.batches.__getitem__, lambda step: {})
    assert found.passed and found.worst < 1e-11
