"""If one rank fails, all stop within seconds, with one clean error that names it."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

import meshwright
from meshwright.compiler.diagnostics import MeshwrightError, error
from meshwright.compiler.graph.program import TensorSpec
from meshwright.compiler.mesh import Mesh
from meshwright.runtime.environment import place_of
from meshwright.runtime.failure import RankFailed
from meshwright.runtime.joined import leave
from meshwright.runtime.launch import launch
from meshwright.runtime.worker import Session, WorkerJob, run_session, run_worker
from tests.parallel.programs import Axes, job
from tests.parallel.ranks import Outcome, run_ranks
from tests.unit.passes import stack
from tests.unit.runtime import toy

FOUR: Axes = (("data", 2), ("tensor", 2))
ROOT = Path(__file__).parents[2]
IMPORTS = {"PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"}


def failing(how: str, rank: int) -> None:
    """A session in which one rank fails and the others wait for it."""

    def body(session: Session) -> None:
        here = session.communicator
        here.all_reduce(torch.ones(2), ("data", "tensor"), "sum")
        if here.rank == rank:
            if how == "raise":
                raise ArithmeticError("something odd")
            if how == "diagnostic":
                raise error("E0610", "there is no data file 'x.bin'", action="check the path")
            if how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if how == "stuck":
                time.sleep(30)
            if how == "shape":
                here.all_reduce(torch.ones(3), ("data",), "sum")
            if how == "axes":
                here.all_reduce(torch.ones(2), ("tensor",), "sum")
        here.all_reduce(torch.ones(2), ("data",), "sum")
        here.all_reduce(torch.ones(2), ("tensor",), "sum")
        here.all_reduce(torch.ones(2), ("data", "tensor"), "max")

    program = toy.program(Mesh(FOUR), "fsdp")
    timeout = timedelta(seconds=3 if how == "stuck" else 60)
    sys.exit(run_session(program, place_of(), body, timeout=timeout))


def errors_of(outcomes: list[Outcome]) -> list[str]:
    return [line for o in outcomes for line in o.output.splitlines() if line.startswith("error[")]


@pytest.mark.parametrize("rank", [0, 3])
@pytest.mark.parametrize(
    ("how", "text"),
    [
        ("raise", "error[E0602]: rank {rank} failed: ArithmeticError: something odd"),
        ("diagnostic", "error[E0610]: there is no data file 'x.bin'"),
        ("kill", "error[E0602]: rank {rank} has died without a word"),
    ],
    ids=["raise", "diagnostic", "kill"],
)
def test_all_stop_and_one_error_tells_who_and_why(how: str, text: str, rank: int) -> None:
    outcomes = run_ranks(4, failing, how, rank, timeout=40)
    assert errors_of(outcomes) == [text.format(rank=rank)], [o.output for o in outcomes]
    assert all(o.exit_code == (-signal.SIGKILL if how == "kill" and r == rank else 1) for r, o in enumerate(outcomes))
    assert max(o.seconds for o in outcomes) < 15
    assert not any("Traceback" in o.output for o in outcomes), [o.output for o in outcomes]
    if how == "raise":
        printed = "".join(o.output for o in outcomes)
        assert "test_failures.py" in printed and "over (data, tensor)" in printed  # where, and what it did last


def test_a_stuck_rank_is_told_by_those_that_wait() -> None:
    outcomes = run_ranks(4, failing, "stuck", 2, timeout=40)
    (line,) = errors_of(outcomes)
    assert line.startswith("error[E0603]: rank ") and "waited in vain in all_reduce" in line
    assert "rank 2 was in all_reduce(sum) of float32[2] over (data, tensor)" in "".join(o.output for o in outcomes)
    assert max(o.seconds for o in outcomes) < 20


@pytest.mark.parametrize("how", ["shape", "axes"])
def test_collectives_that_differ_are_told_with_both_calls(how: str) -> None:
    outcomes = run_ranks(4, failing, how, 2, variables={"MESHWRIGHT_CHECK": "1"}, timeout=40)
    (line,) = errors_of(outcomes)
    assert "E0604" in line
    assert (
        "rank 2 calls "
        + ("all_reduce(sum) of float32[3]" if how == "shape" else "all_reduce(sum) of float32[2] over (tensor)")
        in line
    )
    assert max(o.seconds for o in outcomes) < 15


def script(how: str, rank: int) -> str:
    """A user's own loop over a pipeline, in which one rank ends: what the others are told."""
    model = stack.model(3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = meshwright.parallelize(model, optimizer=optimizer, batch=stack.batch(), plan="pp=3,micro=4")
    step(stack.batch())
    if place_of().rank == rank:
        if how == "leave":
            leave()
            os._exit(0)
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        step(stack.batch())
    except RankFailed as failed:
        leave()
        return str(failed)
    return ""


@pytest.mark.parametrize(
    ("how", "rank", "text"),
    [
        ("kill", 2, "error[E0602]: rank 2 has died without a word"),
        ("leave", 2, "error[E0602]: rank 2 has ended, and rank "),
    ],
    ids=["kill", "leave"],
)
def test_a_script_is_told_which_rank_is_gone(how: str, rank: int, text: str) -> None:
    outcomes = run_ranks(3, script, how, rank, timeout=60)
    told = [o.value for r, o in enumerate(outcomes) if r != rank]
    # the last rank's neighbour loses its connection, and so does the neighbour's neighbour: both are told of the last
    assert len(set(told)) == 1 and told[0].startswith(text), [o.output for o in outcomes]
    assert "all_reduce" not in told[0], "an operation that is long done"
    assert max(o.seconds for o in outcomes) < 40


def working(how: str) -> None:
    """A whole worker in which something is wrong from the start."""

    def load() -> WorkerJob:
        made = job("fsdp", FOUR, steps=2)
        if how == "weights" and place_of().rank == 2:
            return replace(made, weights=other_weights)
        if how == "nan":
            return replace(made, source=BrokenSource())
        return made

    sys.exit(run_worker(load))


def other_weights(name: str, spec: TensorSpec) -> torch.Tensor:
    return toy.weights(name, spec) + 1


class BrokenSource:
    def rows(self, step: int) -> Any:
        def read(name: str, rows: list[int]) -> torch.Tensor:
            batch: Mapping[str, torch.Tensor] = toy.batch(step)
            if step == 1 and 7 in rows and name == "y":
                batch[name][7] = float("inf")
            return batch[name][rows]

        return read


def test_different_first_weights_are_told() -> None:
    outcomes = run_ranks(4, working, "weights", timeout=40)
    assert errors_of(outcomes) == ["error[E0607]: rank 0 and rank 2 begin with different values of 'w'"]


def test_a_loss_that_is_not_finite_ends_the_run() -> None:
    outcomes = run_ranks(4, working, "nan", timeout=40)
    (line,) = errors_of(outcomes)
    assert "E0605" in line and "at step 1: the part of ranks 2, 3 is not finite" in line


def test_a_wrong_number_of_ranks_is_told_with_the_right_one() -> None:
    outcomes = run_ranks(3, working, "", timeout=40)
    (line,) = errors_of(outcomes)
    assert line == "error[E0601]: the program was compiled for 4 ranks (data=2, tensor=2), 3 were started"
    assert all(o.exit_code == 1 for o in outcomes)


def test_launch_streams_rank_0(capfd: pytest.CaptureFixture[str]) -> None:
    launch(2, "tests.parallel.launched", ["train"], variables=IMPORTS)
    printed = capfd.readouterr().out
    assert "hello from rank 0" in printed and "hello from rank 1" not in printed
    assert "step 2/2" in printed


@pytest.mark.parametrize(
    ("how", "text"),
    [("raise", r"rank 1 failed: ArithmeticError: no rate"), ("kill", r"E0602.*rank 1 was killed by SIGKILL")],
)
def test_launch_ends_with_the_error_of_the_rank(how: str, text: str, capfd: pytest.CaptureFixture[str]) -> None:
    began = time.monotonic()
    with pytest.raises((RankFailed, MeshwrightError), match=text):
        launch(2, "tests.parallel.launched", [how], variables=IMPORTS)
    assert time.monotonic() - began < 40
    printed = capfd.readouterr()
    assert "Traceback" not in printed.err + printed.out and "error[" not in printed.err
