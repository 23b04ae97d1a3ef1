"""Faults put into compiled programs are told, correct plans raise nothing."""

from __future__ import annotations

import pytest

from meshwright.compiler.equivalence.check import Relations, check_relations
from meshwright.compiler.equivalence.findings import UNDECIDED, Finding
from meshwright.equivalence import Verdict
from meshwright.verification import Verification
from tests.equivalence.faults import FAULTS, SHARDED, TENSOR, Fault
from tests.equivalence.plans import PLANS, QUICK
from tests.equivalence.tiers import by_numbers, by_relations
from tests.parity.harness import Cell, compiled

SOON = tuple(f for f in FAULTS if f.cell.task.model == "gpt.mw" or f.cell == SHARDED)
LATER = tuple(f for f in FAULTS if f not in SOON)


def test_there_are_enough_of_them() -> None:
    assert len({f.name for f in FAULTS}) == len(FAULTS) >= 40
    assert len(set(PLANS)) >= 60


@pytest.mark.parametrize("fault", SOON, ids=str)
def test_relations_tell_a_fault(fault: Fault) -> None:
    program = compiled(fault.cell)
    assert not by_relations(program)
    fault.put(program)
    assert by_relations(program)


@pytest.mark.slow
@pytest.mark.parametrize("fault", LATER, ids=str)
def test_relations_tell_further_faults(fault: Fault) -> None:
    program = compiled(fault.cell)
    fault.put(program)
    assert by_relations(program)


@pytest.mark.parametrize("name", ["sum missing over tensor, forward", "norm counts a gradient twice"])
def test_numbers_tell_a_fault(name: str) -> None:
    (fault,) = (f for f in FAULTS if f.name == name)
    program = compiled(fault.cell)
    fault.put(program)
    assert by_numbers(program).startswith("difference")


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_numbers_tell_every_fault(fault: Fault) -> None:
    program = compiled(fault.cell)
    fault.put(program)
    assert by_numbers(program)


@pytest.mark.parametrize("cell", QUICK[::4], ids=str)
def test_a_correct_plan_is_proved(cell: Cell) -> None:
    found = check_relations(compiled(cell))
    assert found.proved, found.findings[:3]
    assert found.values > 400


@pytest.mark.slow
@pytest.mark.parametrize("cell", PLANS, ids=str)
def test_every_correct_plan_is_proved(cell: Cell) -> None:
    program = compiled(cell)
    assert not by_relations(program)
    assert not by_numbers(program)


def test_a_finding_says_where_and_what() -> None:
    (fault,) = (f for f in FAULTS if f.name == "vocabulary offset of the embedding missing")
    program = compiled(TENSOR)
    fault.put(program)
    told = check_relations(program).findings[0].diagnostic().render()
    assert told.startswith("error[E0740]: meshwright.embedding is called with another argument")
    assert "gpt.mw:" in told  # the user's line
    assert "= note: found 0\n" in told
    assert "= note: expected tensor * 129\n" in told


def test_what_cannot_be_told_is_said() -> None:
    import torch

    from tests.equivalence.editing import behind, calls, micro

    program = compiled(TENSOR)
    behind(
        micro(program), calls(micro(program), "meshwright.attention.default")[0].args[0], torch.ops.aten.sinh.default
    )
    found = check_relations(program)
    assert found.undecided
    assert found.findings[0].code == UNDECIDED
    assert found.findings[0].node.startswith("sinh")


@pytest.mark.parametrize(("off", "kinds"), [(0.0, ["warning"]), (1.0, ["error", "error"])])
def test_numbers_settle_what_could_not_be_told(off: float, kinds: list[str]) -> None:
    """A warning that nothing has to be done for if they agree; an error beside theirs if they do not."""
    undecided = Relations((Finding(UNDECIDED, "micro", "sinh", "there is no such call"),), 9, 9)
    found = Verdict(undecided, Verification(2, 4, off, 0.0, {"weight": off}, {"weight": off}))
    told = list(found.diagnostics())
    assert [one.kind for one in told] == kinds and found.passed == (off == 0.0)
    assert ("verify it by numbers" in told[0].action) == (not found.passed)
    alone = Verdict(undecided)
    assert not alone.passed and [one.kind for one in alone.diagnostics()] == ["error"]
