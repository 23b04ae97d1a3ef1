"""Learning rates from the user's own optimizer and scheduler."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, ReduceLROnPlateau

from meshwright.compiler.diagnostics import MeshwrightError
from meshwright.runtime.schedule import Built, Schedule


def build(parameters: Sequence[nn.Parameter]) -> Built:
    groups = [{"params": [p], "lr": 0.1 * (i + 1)} for i, p in enumerate(parameters)]
    optimizer = torch.optim.AdamW(groups, betas=(0.8, 0.9))
    return optimizer, LambdaLR(optimizer, lambda step: 1 / (1 + step))


def test_gives_the_rates_of_each_group_and_step() -> None:
    schedule = Schedule(build, ["0/lr", "1/lr", "1/betas/0"])
    for step in (0, 1, 4, 2):  # forward, in jumps, and back again
        found = schedule.at(step)
        assert found == pytest.approx({"0/lr": 0.1 / (1 + step), "1/lr": 0.2 / (1 + step), "1/betas/0": 0.8})


def test_equals_a_loop_with_the_optimizer() -> None:
    parameter = nn.Parameter(torch.zeros(1))
    optimizer, scheduler = build([parameter])
    assert isinstance(scheduler, LRScheduler)
    schedule = Schedule(build, ["0/lr"])
    for step in range(5):
        assert schedule.at(step)["0/lr"] == optimizer.param_groups[0]["lr"]
        optimizer.step()
        scheduler.step()


def test_faults_are_told() -> None:
    with pytest.raises(MeshwrightError, match=r"E0630.*no number 'momentum'"):
        Schedule(build, ["0/momentum"])

    def plateau(parameters: Sequence[nn.Parameter]) -> Built:
        optimizer = torch.optim.SGD(parameters, lr=0.1)
        return optimizer, ReduceLROnPlateau(optimizer)  # type: ignore[return-value]  # the very mistake

    with pytest.raises(MeshwrightError, match="ReduceLROnPlateau"):
        Schedule(plateau, ["0/lr"])

    def one_group(parameters: Sequence[nn.Parameter]) -> Built:
        return torch.optim.SGD(parameters, lr=0.1), None

    with pytest.raises(MeshwrightError, match="has 1 parameter groups"):
        Schedule(one_group, ["0/lr", "1/lr"])
