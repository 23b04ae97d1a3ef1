"""The programs that are checked are those that run: rank by rank, what is sent, received, reduced and waited for."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import pytest
import torch

from meshwright.compiler.analysis import two_holders
from meshwright.compiler.analysis.rank_instructions import rank_instructions
from meshwright.compiler.schedules.deadlock import check_ranks
from meshwright.compiler.schedules.instructions import Program
from meshwright.runtime import two_directions
from meshwright.runtime.materialize import from_module
from tests.parity.harness import examples
from tests.unit.schedules.recorded import listed, recorded
from tests.unit.schedules.whole import CASES, Case, compiled, everyone_of


def runs_as_listed(case: Case, everyone: Sequence[Program], *, finite: bool = True) -> None:
    example = examples(case.task)[0]
    model = copy.deepcopy(example.model).double()
    if not finite:
        with torch.no_grad():
            next(model.parameters()).fill_(float("nan"))
    logs = recorded(compiled(case), from_module(model), example.batch)
    for rank, (log, program) in enumerate(zip(logs, everyone, strict=True)):
        assert log and listed(program) == log, rank


@pytest.mark.parametrize("case", CASES, ids=str)
def test_what_is_checked_is_what_runs(case: Case) -> None:
    runs_as_listed(case, everyone_of(case))


def test_what_two_ranks_have_made_of_a_stage_may_go_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    (case,) = (case for case in CASES if "dualpipe" in case.plan)
    at_once = everyone_of(case)
    for module in (two_directions, two_holders):
        monkeypatch.setattr(module, "BUCKET", 4096)
    everyone = rank_instructions(compiled(case)).everyone()
    assert sum(map(len, everyone)) > sum(map(len, at_once))
    runs_as_listed(case, everyone)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", (CASES[0], CASES[2], CASES[-1]), ids=str)
def test_a_loss_that_is_not_finite(case: Case) -> None:
    programs = rank_instructions(compiled(case), finite=False)
    assert check_ranks(programs) == []
    everyone = programs.everyone()
    assert sum(map(len, everyone)) > sum(map(len, everyone_of(case)))
    runs_as_listed(case, everyone, finite=False)
