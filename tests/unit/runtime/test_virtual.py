"""The executor and the virtual cluster, on a program that was cut by hand."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from meshwright.compiler.diagnostics import InternalError, MeshwrightError
from meshwright.compiler.graph import collectives
from meshwright.compiler.mesh import Mesh
from meshwright.runtime.executor import Executor
from meshwright.runtime.feed import whole_batch
from meshwright.runtime.virtual import VirtualCluster
from tests.unit.runtime import toy

MESHES = [
    Mesh((("data", 1),)),
    Mesh((("data", 4),)),
    Mesh((("data", 2), ("tensor", 2))),
    Mesh((("tensor", 4), ("data", 2))),
]


@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("variant", ["ddp", "fsdp"])
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_equals_one_device(mesh: Mesh, variant: str, microbatches: int) -> None:
    cluster = VirtualCluster(toy.program(mesh, variant, microbatches), toy.weights, keep_gradients=True)
    reference = toy.Reference()
    for step in range(3):
        batch = toy.batch(step)
        result = cluster.step(batch, {"0/lr": 0.1 / (step + 1)})
        loss, norm, gradient = reference.step(batch, 0.1 / (step + 1))
        assert result.loss == pytest.approx(loss, abs=1e-13)
        assert result.norm == pytest.approx(norm, abs=1e-13)
        torch.testing.assert_close(cluster.full_gradients()["w"], gradient, atol=1e-13, rtol=0)
    torch.testing.assert_close(cluster.full_parameters()["w"], reference.w, atol=1e-13, rtol=0)
    torch.testing.assert_close(cluster.full_state()["w/momentum"], reference.moment, atol=1e-13, rtol=0)
    assert cluster.full_buffers()["seen"] == 3


def test_results_of_microbatches_are_joined_in_the_order_of_the_batch() -> None:
    cluster = VirtualCluster(toy.program(Mesh((("data", 2), ("tensor", 2))), "fsdp", 2), toy.weights)
    batch = toy.batch()
    weights = cluster.full_parameters()["w"]
    feed = whole_batch(batch, cluster.rank_program.program)
    results = cluster.run(lambda e: e.step(feed))
    torch.testing.assert_close(cluster.full_result(results, "prediction"), batch["x"] @ weights)


def test_is_the_same_each_time() -> None:
    def run() -> Tensor:
        cluster = VirtualCluster(toy.program(MESHES[2], "fsdp", 2, torch.float32), toy.weights)
        for step in range(3):
            cluster.step(toy.batch(step))
        return cluster.full_parameters()["w"]

    assert torch.equal(run(), run())


def test_a_failing_rank_is_named_and_stops_the_others() -> None:
    cluster = VirtualCluster(toy.program(MESHES[1]), toy.weights)

    def fail(executor: Executor) -> None:
        if executor.communicator.rank == 2:
            raise ZeroDivisionError("boom")
        executor.communicator.all_reduce(torch.ones(1), ("data",), "sum")

    with pytest.raises(InternalError, match="rank 2 failed: ZeroDivisionError: boom"):
        cluster.run(fail)


def test_different_shapes_are_reported_with_both_calls() -> None:
    cluster = VirtualCluster(toy.program(MESHES[1]), toy.weights)

    def differ(executor: Executor) -> None:
        n = 3 if executor.communicator.rank == 1 else 2
        with collectives.use(executor.communicator):
            collectives.all_reduce(torch.ones(n), ("data",))

    with pytest.raises(MeshwrightError, match=r"but rank \d calls all_reduce\(sum\) of float32\[[23]\] over \(data\)"):
        cluster.run(differ)


def test_ranks_that_wait_for_each_other_are_reported() -> None:
    cluster = VirtualCluster(toy.program(MESHES[2]), toy.weights)

    def cross(executor: Executor) -> None:
        axes = ("data",) if executor.communicator.rank in (0, 3) else ("tensor",)
        executor.communicator.all_gather(torch.ones(1), axes)

    with pytest.raises(MeshwrightError) as caught:
        cluster.run(cross)
    text = str(caught.value)
    assert "E0604" in text and "rank 0 waits in all_gather of float32[1] over (data) for rank 2" in text
    assert "rank 3 waits" in text


def test_a_rank_that_ends_early_is_reported() -> None:
    cluster = VirtualCluster(toy.program(MESHES[1]), toy.weights)

    def early(executor: Executor) -> None:
        if executor.communicator.rank:
            executor.communicator.all_gather(torch.ones(1), ("data",))

    with pytest.raises(MeshwrightError, match="for rank 0"):
        cluster.run(early)


def test_a_loss_that_is_not_finite_stops_before_the_update() -> None:
    cluster = VirtualCluster(toy.program(MESHES[1], "fsdp"), toy.weights)
    before = cluster.full_parameters()["w"]
    batch = toy.batch()
    batch["y"][7] = float("nan")  # of the last rank
    with pytest.raises(MeshwrightError, match="loss is nan at step 0: the part of rank 3 is not finite"):
        cluster.step(batch)
    assert torch.equal(cluster.full_parameters()["w"], before)


def test_a_loss_that_is_not_finite_may_be_only_warned_of() -> None:
    cluster = VirtualCluster(toy.program(MESHES[1]), toy.weights, on_non_finite="warn")
    batch = toy.batch()
    batch["y"][0] = float("inf")
    with pytest.warns(UserWarning, match="W0605"):
        cluster.step(batch)
    assert cluster.steps == 1


def test_a_batch_of_another_shape_is_refused() -> None:
    cluster = VirtualCluster(toy.program(MESHES[1]), toy.weights)
    batch = toy.batch()
    batch["x"] = batch["x"][:4]
    with pytest.raises(MeshwrightError, match=r"E0608.*\[4, 5\].*\[8, 5\]"):
        cluster.step(batch)
    with pytest.raises(MeshwrightError, match="has no 'x'"):
        cluster.step({"xx": batch["x"]})


def test_weights_that_are_missing_are_named() -> None:
    with pytest.raises(MeshwrightError, match=r"E0606.*no values for the parameter 'w'"):
        VirtualCluster(toy.program(MESHES[1]), lambda name, spec: {"seen": torch.zeros(())}[name])
