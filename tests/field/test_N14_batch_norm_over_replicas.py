"""N14: batch normalisation under microbatches and on replicas.

Reported: each microbatch was normalised by itself and moved the running statistics once more; replicas kept statistics
of their own, and evaluation then depended on the rank.
https://github.com/pytorch/pytorch/issues/46516
https://github.com/huggingface/pytorch-image-models/issues/110
https://github.com/Lightning-AI/pytorch-lightning/issues/17446

Here statistics are those of the whole batch, once a step, the same on all ranks; microbatches are refused.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from meshwright.compiler.diagnostics import MeshwrightError
from tests.field.against_one_device import Case, cluster_of, eager, train

SAMPLES = 8


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.norm = nn.BatchNorm1d(6)

    def forward(self, x: Tensor) -> Tensor:
        return (self.norm(self.first(x)).relu() ** 3).mean()


def case() -> Case:
    torch.manual_seed(0)
    # the samples of a rank are unlike those of another
    offset = torch.arange(SAMPLES, dtype=torch.float64)[:, None]
    return Case(Model().double(), [{"x": torch.randn(SAMPLES, 4, dtype=torch.float64) + offset} for _ in range(3)])


@pytest.mark.parametrize("plan", ["ddp=2", "fsdp=2", "zero1=4"])
def test_replicas_have_the_statistics_of_the_whole_batch(plan: str) -> None:
    made = case()
    cluster = cluster_of(made, plan, int(plan[-1]))
    found, truth = train(cluster, made), eager(made)
    for step in range(3):
        for name in ("norm.running_mean", "norm.running_var", "norm.num_batches_tracked"):
            torch.testing.assert_close(found.buffers[step][name], truth.buffers[step][name], rtol=1e-12, atol=1e-12)
        assert found.buffers[step]["norm.num_batches_tracked"].item() == step + 1
    for name in ("norm.running_mean", "norm.running_var"):
        copies = [holdings.buffers[name] for holdings in cluster.holdings]
        assert all(torch.equal(copies[0], other) for other in copies[1:])
    assert found.far_from(truth) < 1e-11


def test_two_microbatches_are_refused_and_the_op_is_named() -> None:
    with pytest.raises(MeshwrightError) as caught:
        cluster_of(case(), "ddp=2", 2, microbatches=2)
    (found,) = caught.value.diagnostics
    assert found.code == "E0305" and "whole batch" in found.message
    assert getattr(found.place, "module", "") == "norm"


def test_statistics_of_a_microbatch_would_be_others() -> None:
    """The two meanings differ here, so the agreement above is none by chance."""
    made = case()
    x = made.batches[0]["x"]
    whole, halves = Model().double(), Model().double()
    halves.load_state_dict(whole.state_dict())
    whole(x)
    for half in x.chunk(2):
        halves(half)
    assert (whole.norm.running_var - halves.norm.running_var).abs().max() > 0.01
    assert halves.norm.num_batches_tracked == 2
