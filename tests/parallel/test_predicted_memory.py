"""The peak memory of a step on real ranks is what is predicted, the library's own copies of messages included."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from benchmarks.predicted.cases import Case, model
from benchmarks.predicted.measure import prepare
from meshwright.compiler.cluster.presets import local
from meshwright.compiler.passes.compile import compile_step
from meshwright.compiler.passes.presets import preset
from meshwright.prediction_of import predict_rank_program
from tests.parallel.ranks import run_ranks, values


def peaks(plan: str) -> tuple[int, int]:
    """On one rank: as predicted, and as the allocator saw it."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    ranks = dist.get_world_size()
    program = model("llama").program
    rank_program = compile_step(program, preset(plan, program, ranks))
    _, measured = prepare(Case("llama", plan, ranks), rank_program)
    dist.barrier()
    dist.destroy_process_group()
    return predict_rank_program(rank_program, local(ranks)).memory.peak, measured


@pytest.mark.parametrize("plan", ["fsdp=2,recompute,prefetch", "zero2=2,micro=2"])
def test_peak_memory_is_as_predicted(plan: str) -> None:
    for predicted, measured in values(run_ranks(2, peaks, plan, timeout=300)):
        assert predicted == pytest.approx(measured, rel=0.05)
