"""The programs that are checked are those that run: rank by rank, what is sent, received, reduced and waited for."""

from __future__ import annotations

import copy

import pytest

from meshwright.runtime.materialize import from_module
from tests.parity.harness import examples
from tests.unit.schedules.recorded import listed, recorded
from tests.unit.schedules.whole import CASES, Case, compiled, everyone_of


@pytest.mark.parametrize("case", CASES, ids=str)
def test_what_is_checked_is_what_runs(case: Case) -> None:
    example = examples(case.task)[0]
    logs = recorded(compiled(case), from_module(copy.deepcopy(example.model).double()), example.batch)
    for rank, (log, program) in enumerate(zip(logs, everyone_of(case), strict=True)):
        assert log and listed(program) == log, rank
