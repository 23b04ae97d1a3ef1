"""A module as ``meshwright run`` would start it: trains the toy program, or fails in a way that is asked for."""

from __future__ import annotations

import os
import signal
import sys

from meshwright.runtime.worker import WorkerJob, run_worker
from tests.parallel.programs import job


def load() -> WorkerJob:
    how, rank = sys.argv[1], os.environ["RANK"]
    made = job("fsdp", (("data", 2),), steps=2)
    if how == "raise" and rank == "1":

        def scalars(step: int) -> dict[str, float]:
            raise ArithmeticError("no rate")

        return WorkerJob(made.rank_program, made.weights, made.source, scalars, made.config)
    if how == "kill" and rank == "1":

        def killed(step: int) -> dict[str, float]:
            os.kill(os.getpid(), signal.SIGKILL)
            return {}

        return WorkerJob(made.rank_program, made.weights, made.source, killed, made.config)
    return made


if __name__ == "__main__":
    print("hello from rank", os.environ["RANK"])
    sys.exit(run_worker(load))
