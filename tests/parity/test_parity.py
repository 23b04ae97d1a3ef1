"""Compiled steps agree with one device: a selection of the table that ``python -m benchmarks.parity`` prints."""

from __future__ import annotations

import pytest

from tests.parity.cells import COLUMNS, QUICK, ROWS
from tests.parity.harness import Cell, measure

TOLERANCE = 1e-9


@pytest.mark.parametrize("cell", QUICK, ids=str)
def test_agrees_with_one_device(cell: Cell) -> None:
    found = measure(cell)
    assert found.worst < TOLERANCE, found


def test_the_selection_covers_every_model_and_plan() -> None:
    assert {cell.task.model for cell in QUICK} == {task.model for task in COLUMNS.values()}
    assert {(cell.plan, cell.ranks) for cell in QUICK} == {(row.preset, row.ranks) for row in ROWS}
