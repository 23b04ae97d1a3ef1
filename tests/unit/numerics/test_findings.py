"""Each kind of finding is found where it is, tells the user's line, and goes away where the plan is safe."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

from meshwright.compiler.numerics import findings
from meshwright.compiler.numerics.accumulators import measured_on
from meshwright.compiler.numerics.error_model import error_of_sum, one_rounding
from meshwright.compiler.numerics.finding import BY_PASS, KINDS
from tests.unit.numerics.cases import CASES, MIXED, SENT, Case, Linear, Scattered


@pytest.mark.parametrize("code", KINDS)
def test_each_kind_is_found_at_the_users_line(code: str) -> None:
    found = [f for f in findings(CASES[code].compiled()) if f.code == code]
    assert found
    for one in found:
        assert one.origin.file == __file__.replace("test_findings", "cases"), one.origin
        assert one.origin.text
        text = one.diagnostic.render()
        assert f"[{code}]" in text and one.nodes[0] in text and "predicted relative error" in text


@pytest.mark.parametrize("code", KINDS)
def test_a_safe_plan_has_none_that_the_pass_can_mend(code: str) -> None:
    assert [f.code for f in findings(CASES[code].compiled("safe")) if f.rewrite in BY_PASS and not f.advice] == []


def test_an_fp32_step_has_no_findings() -> None:
    assert findings(Case(Linear, None, "ddp=4,micro=4").compiled()) == ()
    assert findings(Case(Scattered, None, "fsdp=4", batch=512).compiled()) == ()


def test_mixed_precision_with_fp32_sums_has_none() -> None:
    """The usual policy: bf16 computation, fp32 weights and sums."""
    assert findings(Case(Linear, MIXED, "ddp=2,fsdp=2,micro=4").compiled()) == ()


def test_what_is_predicted_is_what_the_formulas_say() -> None:
    (found,) = findings(CASES["E0720"].compiled())
    assert (found.count, found.dtype, found.addends) == (4, "bf16", "random signs")
    assert found.error == error_of_sum("bf16", 4)
    assert found.roundings == pytest.approx(found.error / one_rounding("bf16"))
    assert not found.grave
    (lost,) = findings(CASES["E0732"].compiled())
    assert lost.addends == "coherent" and lost.grave and lost.count == 512


def test_two_ranks_are_one_rounding() -> None:
    assert findings(Case(Linear, SENT, "ddp=2").compiled()) == ()


def test_one_device_is_looked_at_without_a_plan() -> None:
    assert {f.code for f in findings(CASES["E0725"].program())} == {"E0725"}
    assert {f.code for f in findings(CASES["E0727"].program())} == {"E0727"}


def test_the_help_names_a_plan_only_where_there_is_one() -> None:
    alone, planned = (
        next(f for f in findings(step) if f.code == "E0725").diagnostic
        for step in (CASES["E0725"].program(), CASES["E0725"].compiled())
    )
    assert alone.action.endswith("compile with numerics=safe (--plan fsdp=4,numerics=safe, say)")
    assert planned.action.endswith('write numerics = "safe" in the plan')
    assert any(note.startswith("measured on CPU, torch ") for note in alone.notes)


def test_a_measurement_is_of_the_devices_that_were_asked_for() -> None:
    op = "aten.index_add.default"
    assert measured_on(op, "bf16", "cpu").startswith("measured on CPU, torch ")
    assert measured_on(op, "bf16") == measured_on(op, "bf16", "cpu") == measured_on(op, "f16")


def test_the_help_of_weights_says_where_their_precision_is_written() -> None:
    action = next(f for f in findings(CASES["E0726"].compiled()) if f.code == "E0726").diagnostic.action
    assert all(word in action for word in ("factory", "--precision", "meshwright.parallelize"))


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Scattered() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([layer(x) for layer in self.layers]).sum()


def test_copies_of_a_block_are_told_once() -> None:
    (found,) = findings(Case(Stack, MIXED, "ddp=1").compiled())
    assert found.code == "E0725" and len(found.nodes) == 3
    assert re.search("and 2 more", found.diagnostic.render())
