"""What is declared of couplings: in plans, presets, pins and arguments, and what the planner makes of it."""

from __future__ import annotations

import copy

import pytest
import torch

import meshwright
from meshwright.compiler.cluster.presets import preset as cluster
from meshwright.compiler.diagnostics import MeshwrightError, Span
from meshwright.compiler.mesh import Mesh
from meshwright.compiler.passes.presets import preset
from meshwright.compiler.plan import Declaration, Plan
from meshwright.compiler.plan_file import plan_to_toml, read_plan
from meshwright.compiler.search.limits import Limits
from meshwright.compiler.search.pin_text import parse_pins
from meshwright.compiler.separability_text import declarations
from meshwright.planning import Planned, plan_program
from tests.field.against_one_device import Case, cluster_of, eager, train
from tests.field.test_batch_norm import classifier
from tests.unit.separability.models import Deep, case

DECLARED = (
    Declaration("encoder.*.norm", "global"),
    Declaration("loss.py:31", "global"),
    Declaration("batch statistic", "global"),
    Declaration("**", "per data rank"),
)


def test_a_plan_keeps_them_and_their_order() -> None:
    plan = Plan(Mesh((("data", 2),)), separability=DECLARED)
    text = plan_to_toml(plan)
    assert read_plan(text) == plan
    assert '"encoder.*.norm" = "global"' in text and 'default = "per data rank"' in text
    assert read_plan("[mesh]\ndata = 2\n").separability == ()


def test_the_default_comes_last_wherever_it_stands() -> None:
    text = '[mesh]\ndata = 2\n\n[separability]\ndefault = "global"\nnorm = "per-microbatch"\n'
    assert read_plan(text).separability == (Declaration("norm", "per microbatch"), Declaration("**", "global"))


def test_a_word_that_is_none() -> None:
    with pytest.raises(MeshwrightError) as caught:
        read_plan('[mesh]\ndata = 2\n\n[separability]\nnorm = "local"\n')
    (found,) = caught.value.diagnostics
    assert found.code == "E0765" and isinstance(found.place, Span) and found.place.line == 5
    for given in ("local", {"norm": "globl"}):
        with pytest.raises(MeshwrightError) as other:
            declarations(given)
        assert other.value.diagnostics[0].code == "E0765"


def test_text_of_a_command() -> None:
    wanted = (Declaration("loss.py:31", "per microbatch"), Declaration("**", "global"))
    assert declarations(["global", "loss.py:31=per-microbatch"]) == declarations("loss.py:31 = per-microbatch;global")
    assert declarations(["global", "loss.py:31=per-microbatch"]) == wanted == declarations(wanted)
    assert declarations("batch statistic=global") == (Declaration("batch statistic", "global"),)
    assert parse_pins(["separability=norm=global"]).separability == (Declaration("norm", "global"),)
    for twice in (["aux=global", "aux=per-microbatch"], "global;global"):
        with pytest.raises(MeshwrightError) as caught:
            declarations(twice)
        assert caught.value.diagnostics[0].code == "E0765"


def test_words_of_presets_and_pins() -> None:
    program = classifier().program
    made = preset("fsdp=2,separability=per-data-rank,micro=2", program)
    assert made.separability == (Declaration("**", "per data rank"),) and made.microbatches == 2
    assert "separability=per-data-rank" in made.name
    assert parse_pins(["separability=global"]).separability == (Declaration("**", "global"),)
    with pytest.raises(MeshwrightError):
        preset("fsdp=2,separability", program)


@pytest.mark.parametrize("declared", ["global", {"norm": "global"}, {"batch statistic": "global"}])
def test_parallelize(declared: str | dict[str, str]) -> None:
    one = classifier()
    alone, model = copy.deepcopy(one.model), copy.deepcopy(one.model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch = dict(one.batches[0])
    step = meshwright.parallelize(
        model, optimizer=optimizer, batch=batch, plan="ddp=2,micro=2", virtual=2, separability=declared
    )
    loss = float(step(batch))
    want = alone(**batch)
    want.backward()
    torch.optim.SGD(alone.parameters(), lr=0.1).step()
    assert abs(loss - float(want.detach())) < 1e-12
    found = step.full_state_dict()
    for name, value in alone.state_dict().items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("declared", "code"), [({"first": "global"}, "E0765"), ({"contrastive loss": "global"}, "E0305")]
)
def test_a_meaning_of_another_line_opens_nothing(declared: dict[str, str], code: str) -> None:
    one = classifier()
    optimizer = torch.optim.SGD(one.model.parameters(), lr=0.1)
    with pytest.raises(MeshwrightError) as caught:
        meshwright.parallelize(
            one.model, optimizer=optimizer, batch=dict(one.batches[0]), plan="ddp=2,micro=2", virtual=2,
            separability=declared,
        )  # fmt: skip
    assert caught.value.diagnostics[0].code == code


def test_groups_of_two_sizes_exclude_each_other() -> None:
    one = classifier()
    optimizer = torch.optim.SGD(one.model.parameters(), lr=0.1)
    with pytest.raises(MeshwrightError) as caught:
        meshwright.parallelize(
            one.model, optimizer=optimizer, batch=dict(one.batches[0]), plan="ddp=2,micro=2", virtual=2,
            separability={"norm": "per data rank", "default": "per microbatch"},
        )  # fmt: skip
    (found,) = caught.value.diagnostics
    assert found.code == "E0767"
    assert "'norm' per data rank" in found.message and "all else per microbatch" in found.message
    assert found.action == "declare all else per data rank too, or one of them global"


def planned(*pins: str, one: Case | None = None) -> Planned:
    where = cluster("a100x2")
    assert where is not None
    return plan_program((one or classifier()).program, where, limits=Limits(pins=parse_pins(pins)))


def test_the_planner_cuts_no_batch_that_couples_and_says_why() -> None:
    found = planned()
    assert {p.candidate.microbatches for p in found.search.priced} == {1}
    (said,) = [reason for reason in found.reasons if "samples couple" in reason]
    assert "test_batch_norm.py:" in said and "(batch statistic)" in said


def test_what_is_declared_opens_microbatches() -> None:
    found = planned("separability=global", "micro=2")
    assert found.plan.microbatches == 2
    assert found.plan.separability == (Declaration("**", "global"),)
    assert any("Microbatches meet in test_batch_norm.py:" in reason for reason in found.reasons)


def test_a_pipeline_is_refused_where_nothing_is_declared_of_samples_that_couple() -> None:
    with pytest.raises(MeshwrightError) as caught:
        planned("pp=2", one=case(Deep()))
    assert caught.value.diagnostics[0].code == "E0766"


@pytest.mark.parametrize("pins", [("pp=2",), ("pp=2", "micro=4"), ("pp=2", "micro=2", "virtual=2")])
def test_the_planner_takes_a_schedule_that_lets_microbatches_meet(pins: tuple[str, ...]) -> None:
    one = case(Deep())
    found = planned(*pins, "separability=global", one=one)
    assert found.candidate.pipe == 2 and found.plan.microbatches > 1
    assert {p.candidate.schedule for p in found.search.priced} <= {"gpipe", "breadth-first"}
    assert any("all of them go forward before one goes back" in reason for reason in found.reasons)
    assert train(cluster_of(one, found.plan), one).far_from(eager(one)) < 1e-11


def test_a_schedule_that_does_not_let_them_meet_is_refused() -> None:
    with pytest.raises(MeshwrightError) as caught:
        planned("pp=2", "schedule=1f1b", "separability=global", one=case(Deep()))
    (found,) = caught.value.diagnostics
    assert found.code == "E0766" and found.action is not None and "gpipe or breadth-first" in found.action


def test_a_pipeline_with_one_microbatch_may_be_asked_for() -> None:
    found = planned("pp=2", "micro=1", "separability=global", one=case(Deep()))
    assert found.candidate.pipe == 2 and found.plan.microbatches == 1
    assert not any("there is no pipeline" in reason for reason in found.reasons)


def test_a_pin_that_cuts_it_all_the_same_is_refused() -> None:
    with pytest.raises(MeshwrightError) as caught:
        planned("micro=2")
    (found,) = caught.value.diagnostics
    assert found.code == "E0436" and "samples couple in test_batch_norm.py:" in found.message


def test_a_preset_takes_what_the_page_says() -> None:
    program = classifier().program
    made = preset("fsdp=2,separability=encoder.*.norm=global;loss.py:31=per-microbatch,micro=2", program)
    assert {d.pattern: d.meaning for d in made.separability} == {
        "encoder.*.norm": "global",
        "loss.py:31": "per microbatch",
    }
    assert made.microbatches == 2
