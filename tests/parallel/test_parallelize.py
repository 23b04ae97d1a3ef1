"""``meshwright.parallelize`` under real processes gives what one device gave, whatever the ranks' seeds."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import meshwright
from meshwright.compiler.diagnostics import MeshwrightError
from tests.parallel.ranks import run_ranks, values
from tests.unit.api.small_model import adamw, batch, eager_steps, language, schedule

RANKS = 4
History = tuple[list[float], list[float], dict[str, Tensor]]


def train(plan: str, folder: str, load_from: str = "") -> History:
    """Three steps on this rank, whose model has weights of its own: losses, norms and the whole weights after them.

    Then a checkpoint; or, with ``load_from``, three steps from there.
    """
    import torch.distributed as dist

    rank = int(os.environ["RANK"])
    model = language(seed=rank)
    optimizer = adamw(model)
    rates = schedule(optimizer)
    step = meshwright.parallelize(model, optimizer=optimizer, batch=batch(0), plan=plan, clip=0.5)
    if load_from:
        step.load(load_from)
    for _ in range(step.steps):
        rates.step()
    losses, norms = [], []
    for number in range(step.steps, step.steps + 3):
        losses.append(float(step(batch(number))))
        assert step.norm is not None
        norms.append(step.norm)
        rates.step()
    if folder:
        step.save(folder)
    whole = step.full_state_dict()
    dist.barrier()
    return losses, norms, whole


def refused(plan: str) -> list[tuple[str, str]]:
    """The code and the action with which this rank's step, and a batch of another shape, are refused."""
    model = language()
    found = []
    try:
        meshwright.parallelize(model, optimizer=adamw(model), batch=batch(0), plan=plan)
    except MeshwrightError as fault:
        found += [(d.code, d.action) for d in fault.diagnostics]
    step = meshwright.parallelize(model, optimizer=adamw(model), batch=batch(0), plan="ddp")
    try:
        step({n: x[:4] for n, x in batch(0).items()})
    except MeshwrightError as fault:
        found += [(d.code, d.action) for d in fault.diagnostics]
    return found


def check(found: list[Any], losses: list[float], weights: dict[str, Tensor]) -> None:
    for rank, (mine, norms, whole) in enumerate(found):
        assert mine == found[0][0] and norms == found[0][1], rank
        assert set(whole) == set(weights)
        for name, right in weights.items():
            assert torch.equal(whole[name], found[0][2][name]), (rank, name)
            torch.testing.assert_close(whole[name], right, rtol=1e-12, atol=1e-12, msg=name)
    assert found[0][0] == pytest.approx(losses, rel=1e-12)


@pytest.mark.parametrize(
    ("plan", "other"), [pytest.param("fsdp", "ddp=2,tp=2", marks=pytest.mark.slow), ("fsdp=2,tp=2,micro=2", "zero1")]
)
def test_rank_0_decides_and_a_checkpoint_goes_on_under_another_plan(plan: str, other: str, tmp_path: Path) -> None:
    truth = language(seed=0)
    losses = eager_steps(truth, 6, clip=0.5)
    halfway = language(seed=0)
    eager_steps(halfway, 3, clip=0.5)
    first = values(run_ranks(RANKS, train, plan, str(tmp_path), timeout=120))
    check(first, losses[:3], halfway.state_dict())
    second = values(run_ranks(RANKS, train, other, "", str(tmp_path), timeout=120))
    check(second, losses[3:], truth.state_dict())


def test_every_rank_is_told_what_is_wrong() -> None:
    for codes in values(run_ranks(RANKS, refused, "fsdp=2", timeout=120)):
        assert [c for c, _ in codes] == ["E0307", "E0608"]
        assert all(action for _, action in codes)
