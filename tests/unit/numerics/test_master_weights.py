"""Under ``numerics = "safe"`` a weight in half precision that would lose its updates has a master copy in fp32."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from meshwright.compiler.diagnostics import DiagnosticWarning
from meshwright.compiler.graph.program import StepProgram
from meshwright.compiler.graph.single import run_single
from meshwright.compiler.numerics import findings
from meshwright.compiler.passes.master_weights import losing_weights, with_master_weights
from meshwright.compiler.passes.pipeline import compile_plan
from meshwright.compiler.passes.presets import preset
from meshwright.compiler.plan import Precision
from meshwright.frontend.capture import capture
from meshwright.runtime import checkpoint
from meshwright.runtime.checkpoint_planner import Shards
from meshwright.runtime.materialize import from_module
from meshwright.runtime.virtual import VirtualCluster
from tests.unit.numerics.cases import HALF

STEPS = 6


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(16, 32)
        self.down = nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([Block(), Block()])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.float().square().mean()


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-5)


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=5e-4, momentum=0.9)


OPTIMIZERS = {"adamw": adamw, "momentum": momentum}


def step_of(make: Callable[[nn.Module], torch.optim.Optimizer], precision: Precision = HALF) -> StepProgram:
    model = Net()
    return capture(model, {"x": batch()}, make(model), precision=precision)


def batch() -> Tensor:
    return torch.randn(8, 16, generator=torch.Generator().manual_seed(1))


def weights() -> dict[str, Tensor]:
    return {name: p.detach().bfloat16() for name, p in Net().named_parameters()}


def trained(program: StepProgram, first: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Weights and state after some steps on one device."""
    parameters, state = first, None
    for step in range(STEPS):
        made = run_single(program, parameters, {}, state, {"x": batch()}, step=step)
        parameters, state = made.parameters, made.state
    assert state is not None
    return parameters, state


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_weights_that_stand_still_as_written_are_trained_with_a_master_copy(optimizer: str) -> None:
    written = step_of(OPTIMIZERS[optimizer])
    names = losing_weights(written)
    assert names == set(weights())
    safe = with_master_weights(written, names)
    assert losing_weights(safe) == frozenset()
    assert not [f for f in findings(safe) if f.code in ("E0726", "E0729")]
    still, _ = trained(written, weights())
    low, state = trained(safe, weights())
    # the same optimizer on fp32 weights, whose gradients are those of the rounded weights: what a master copy means
    wide = _by_torch(written, OPTIMIZERS[optimizer])
    unmoved = sum(int((still[name] == first).sum()) for name, first in weights().items())
    assert unmoved > 0.9 * sum(first.numel() for first in weights().values())
    for name, expected in wide.items():
        master = state[f"{name}/master"]
        assert master.dtype == torch.float32
        assert not torch.equal(master, weights()[name].float())
        assert torch.allclose(master, expected, rtol=1e-6, atol=1e-8)
        assert torch.equal(low[name], master.bfloat16())


def _by_torch(written: StepProgram, make: Callable[[nn.Module], torch.optim.Optimizer]) -> dict[str, Tensor]:
    """The fp32 weights that torch's optimizer makes of the step's gradients at the rounded weights."""
    model = Net()
    wide = dict(model.named_parameters())
    with torch.no_grad():
        for name, value in weights().items():
            wide[name].copy_(value)
    optimizer = make(model)
    for step in range(STEPS):
        low = {name: p.detach().bfloat16() for name, p in wide.items()}
        made = run_single(written, low, {}, None, {"x": batch()}, step=step)
        for name, p in wide.items():
            p.grad = made.gradients[name].float()
        optimizer.step()
    return {name: p.detach() for name, p in wide.items()}


@pytest.mark.parametrize("plan", ["ddp=2", "zero1=2", "fsdp=2", "tp=2", "pp=2,micro=2"])
def test_a_partitioned_step_keeps_the_same_masters(plan: str) -> None:
    """With momentum: its updates are as exact as the gradients. Adam divides gradients near 0 by themselves."""
    written = step_of(momentum)
    compiled = compile_plan(written, preset(plan + ",numerics=safe", written))
    assert not [f for f in findings(compiled) if f.code == "E0726"]
    model = Net()
    cluster = VirtualCluster(compiled, from_module(model))
    _, single = trained(with_master_weights(written, losing_weights(written)), weights())
    for _ in range(STEPS):
        cluster.step({"x": batch()})
    state = cluster.full_state()
    for name in weights():
        found, expected = state[f"{name}/master"], single[f"{name}/master"]
        moved = (expected - weights()[name].float()).norm()
        assert (found - expected).norm() < 0.02 * moved
        assert torch.equal(cluster.full_parameters()[name], found.bfloat16())


def cluster_of(written: StepProgram, plan: str) -> tuple[VirtualCluster, Shards]:
    compiled = compile_plan(written, preset(plan, written))
    cluster = VirtualCluster(compiled, from_module(Net()))
    places = [compiled.mesh.coordinates(rank) for rank in range(compiled.mesh.size(*compiled.mesh.names))]
    return cluster, Shards(compiled, list(zip(places, cluster.holdings, strict=True)))


def test_masters_are_saved_and_loaded_on_another_mesh(tmp_path: Path) -> None:
    written = step_of(adamw)
    first, shards = cluster_of(written, "fsdp=2,numerics=safe")
    first.step({"x": batch()})
    checkpoint.save(shards, tmp_path, step=1, seed=0)
    second, others = cluster_of(written, "tp=2,numerics=safe")
    checkpoint.load(others, tmp_path)
    for name, tensor in first.full_state().items():
        assert torch.equal(second.full_state()[name], tensor)


def test_masters_that_a_checkpoint_lacks_begin_as_its_weights(tmp_path: Path) -> None:
    written = step_of(momentum)
    first, shards = cluster_of(written, "ddp=2,numerics=as-written")
    first.step({"x": batch()})
    checkpoint.save(shards, tmp_path, step=1, seed=0)
    second, others = cluster_of(written, "zero1=2,numerics=safe")
    with pytest.warns(DiagnosticWarning, match="W0786"):
        checkpoint.load(others, tmp_path)
    for name, tensor in first.full_parameters().items():
        assert torch.equal(second.full_state()[f"{name}/master"], tensor.float())


def test_masters_that_a_program_does_not_keep_are_told_of(tmp_path: Path) -> None:
    written = step_of(momentum)
    first, shards = cluster_of(written, "fsdp=2,numerics=safe")
    first.step({"x": batch()})
    checkpoint.save(shards, tmp_path, step=1, seed=0)
    second, others = cluster_of(written, "ddp=2,numerics=as-written")
    with pytest.warns(DiagnosticWarning, match="W0787"):
        checkpoint.load(others, tmp_path)
    for name, tensor in first.full_parameters().items():
        assert torch.equal(second.full_parameters()[name], tensor)
