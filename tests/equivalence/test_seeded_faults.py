"""Faults put into compiled programs are told, correct plans raise nothing."""

from __future__ import annotations

import pytest

from meshwright.compiler.equivalence.check import check_relations
from meshwright.compiler.equivalence.findings import UNDECIDED
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
