"""H01: ranks run out of data at different times, and those with more wait for ever.

Reported: a rank with a batch more waits in a reduction that the others never join; remedies differ, and some miss
collectives of the forward pass.
https://github.com/pytorch/pytorch/issues/33148
https://github.com/pytorch/pytorch/issues/38174
https://github.com/Lightning-AI/pytorch-lightning/issues/20404
https://github.com/QwenAudio/CosyVoice/issues/297

A batch is one for all ranks, and each takes its share: what does not come out even is padded, and padding weighs
nothing. So every rank does the same steps, the stages of a pipeline too, of which only some read data.
"""

from __future__ import annotations

import sys
import time
from datetime import timedelta

import pytest
from torch import Tensor

from meshwright.compiler.diagnostics import error
from meshwright.compiler.passes.pipeline import compile_plan
from meshwright.compiler.passes.presets import preset
from meshwright.runtime.feed import Rows, batch_by_rows
from meshwright.runtime.materialize import from_module
from meshwright.runtime.train import TrainConfig
from meshwright.runtime.virtual import VirtualCluster
from meshwright.runtime.worker import WorkerJob, run_worker
from tests.field.against_one_device import captured, cluster_of, eager, train
from tests.field.stacks import batch, case
from tests.parallel.ranks import run_ranks


@pytest.mark.parametrize(
    ("plan", "ranks", "samples", "microbatches"),
    [("pp=2,ddp=2", 4, 9, 3), ("pp=2,fsdp=2,schedule=zb-v", 4, 6, 2), ("pp=2,ddp=4", 8, 10, 2)],
)
def test_a_batch_that_does_not_come_out_even(plan: str, ranks: int, samples: int, microbatches: int) -> None:
    """Of 3 samples one of two ranks has one less, of 5 samples one of four ranks has none."""
    made = case(samples=samples, steps=1)
    assert train(cluster_of(made, plan, ranks, microbatches), made).far_from(eager(made)) < 1e-11


class Ending:
    """A source whose rows of one half end before those of the other."""

    def rows(self, step: int) -> Rows:
        def read(name: str, rows: list[int]) -> Tensor:
            if step == 1 and rows and max(rows) >= 4:
                raise error("E0611", "there are no more samples", action="give more data")
            return batch(step)[name][rows]

        return read


def test_data_that_ends_in_the_middle_of_a_step_is_told() -> None:
    """Half of the ranks have their rows, the other half has none: nobody waits for anybody."""
    program = captured(case())
    cluster = VirtualCluster(compile_plan(program, preset("pp=2,ddp=2,micro=4", program)), from_module(case().model))
    cluster.step(batch_by_rows(Ending().rows(0), program))
    with pytest.raises(Exception, match=r"E0611.*no more samples"):
        cluster.step(batch_by_rows(Ending().rows(1), program))


def working() -> None:
    def load() -> WorkerJob:
        program = captured(case())
        compiled = compile_plan(program, preset("pp=2,ddp=2,micro=4", program))
        return WorkerJob(compiled, from_module(case().model), Ending(), lambda step: {}, TrainConfig(steps=3))

    sys.exit(run_worker(load, timeout=timedelta(seconds=60)))


def test_real_ranks_stop_with_the_reason() -> None:
    began = time.monotonic()
    outcomes = run_ranks(4, working, timeout=100)
    told = [line for o in outcomes for line in o.output.splitlines() if line.startswith("error[")]
    assert told == ["error[E0611]: there are no more samples"], [o.output for o in outcomes]
    assert all(o.exit_code == 1 for o in outcomes)
    assert time.monotonic() - began < 90
