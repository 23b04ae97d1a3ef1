"""H06: one rank fails, and the others wait.

Reported: the others sit in a collective until somebody's watch ends it, half an hour later, with a number and no cause.
https://github.com/pytorch/pytorch/issues/163546
https://github.com/pytorch/pytorch/issues/97191
https://github.com/pytorch/pytorch/issues/118369

Here: in the middle of a pipeline, where the others wait for messages. ``python -m benchmarks.killed`` kills ranks at
random moments; ranks without a pipeline are in tests/parallel/test_failures.py.
"""

from __future__ import annotations

import sys
from datetime import timedelta
from typing import Any

import pytest

from meshwright.compiler.diagnostics import InternalError
from meshwright.compiler.graph.pipeline_program import Compiled
from meshwright.compiler.passes.pipeline import compile_plan
from meshwright.compiler.passes.presets import preset
from meshwright.runtime import pipeline
from meshwright.runtime.environment import place_of
from meshwright.runtime.executors import executor_for
from meshwright.runtime.feed import whole_batch
from meshwright.runtime.mail import ProcessMail
from meshwright.runtime.materialize import from_module, materialize
from meshwright.runtime.virtual import VirtualCluster
from meshwright.runtime.worker import Session, run_session
from tests.field.against_one_device import captured
from tests.field.stacks import batch, case
from tests.parallel.ranks import run_ranks

FAILING = 1


def compiled() -> Compiled:
    program = captured(case())
    return compile_plan(program, preset("pp=2,ddp=2,micro=4", program))


class OutOfMemory(RuntimeError):
    """As a device would say it."""


def failing_pass(self: Any, stage: int, kind: str, microbatch: int) -> None:
    if self.executor.communicator.rank == FAILING and (kind, microbatch) == ("I", 1):
        raise OutOfMemory("no memory is left")
    PASS(self, stage, kind, microbatch)


PASS = pipeline._Passes._pass


def test_virtual_ranks_stop_with_the_first_that_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline._Passes, "_pass", failing_pass)
    cluster = VirtualCluster(compiled(), from_module(case().model))
    with pytest.raises(InternalError, match=f"rank {FAILING} failed: OutOfMemory: no memory is left"):
        cluster.step(batch(0))


def working() -> None:
    pipeline._Passes._pass = failing_pass
    program = compiled()

    def body(session: Session) -> None:
        at = program.mesh.coordinates(session.place.rank)
        (holdings,) = materialize(program, from_module(case().model), [at])
        executor = executor_for(program, session.communicator, ProcessMail(session.communicator), holdings)
        executor.step(whole_batch(batch(0), program.program))

    sys.exit(run_session(program, place_of(), body, timeout=timedelta(seconds=300)))


def test_real_ranks_stop_at_once_and_tell_who_where_and_why() -> None:
    outcomes = run_ranks(4, working, timeout=120)
    printed = "".join(o.output for o in outcomes)
    told = [line for line in printed.splitlines() if line.startswith("error[")]
    assert told == [f"error[E0602]: rank {FAILING} failed: OutOfMemory: no memory is left"], printed
    assert all(o.exit_code == 1 for o in outcomes)
    assert "at instruction" in printed and "0B1" in printed, "where it was"
    assert max(o.seconds for o in outcomes) - min(o.seconds for o in outcomes) < 10
