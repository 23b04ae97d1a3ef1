"""Under ``numerics = "safe"`` a weight in half precision that would lose its updates has a master copy in fp32."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from meshwright.compiler.cluster.presets import preset as preset_cluster
from meshwright.compiler.diagnostics import DiagnosticWarning
from meshwright.compiler.emit.artefact import read_artefact, write_artefact
from meshwright.compiler.graph.program import StepProgram, TensorSpec
from meshwright.compiler.graph.single import run_single
from meshwright.compiler.numerics import findings
from meshwright.compiler.passes.master_weights import losing_weights, with_master_weights
from meshwright.compiler.passes.pipeline import compile_plan
from meshwright.compiler.passes.presets import preset
from meshwright.compiler.plan import Precision
from meshwright.compiler.search.limits import Limits
from meshwright.compiler.search.pin_text import parse_pins
from meshwright.frontend.capture import capture
from meshwright.planning import plan_program
from meshwright.prediction_of import predict_step
from meshwright.runtime import checkpoint
from meshwright.runtime.checkpoint_planner import Shards
from meshwright.runtime.materialize import from_module
from meshwright.runtime.virtual import VirtualCluster
from tests.unit.emit.test_artefact import SOURCE, TRAIN
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
    model = rounded_net()
    wide = dict(model.named_parameters())
    optimizer = make(model)
    for step in range(STEPS):
        low = {name: p.detach().bfloat16() for name, p in wide.items()}
        made = run_single(written, low, {}, None, {"x": batch()}, step=step)
        for name, p in wide.items():
            p.grad = made.gradients[name].float()
        optimizer.step()
    return {name: p.detach() for name, p in wide.items()}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("plan", ["ddp=2", "zero1=2", "fsdp=2", "tp=2", "pp=2,micro=2"])
def test_a_partitioned_step_keeps_the_masters_of_its_gradients(plan: str, optimizer: str) -> None:
    """What torch's optimizer makes of fp32 weights and the gradients that the ranks have: those themselves are rounded
    otherwise than on one device, and Adam divides the ones near 0 by themselves."""
    written = step_of(OPTIMIZERS[optimizer])
    compiled = compile_plan(written, preset(plan + ",numerics=safe", written))
    assert not [f for f in findings(compiled) if f.code == "E0726"]
    cluster = VirtualCluster(compiled, from_module(Net()), keep_gradients=True)
    wide = rounded_net()
    torch_optimizer = OPTIMIZERS[optimizer](wide)
    for _ in range(STEPS):
        cluster.step({"x": batch()})
        gradients = cluster.full_gradients()
        for name, p in wide.named_parameters():
            p.grad = gradients[name].float()
        torch_optimizer.step()
        state = cluster.full_state()
        for name, p in wide.named_parameters():
            assert torch.allclose(state[f"{name}/master"], p, rtol=1e-6, atol=1e-8), name
            assert torch.equal(cluster.full_parameters()[name], state[f"{name}/master"].bfloat16())


def rounded_net() -> Net:
    """In fp32, with the weights that the ranks begin with."""
    model = Net()
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(weights()[name])
    return model


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


def test_weights_that_are_read_alone_are_where_masters_begin(tmp_path: Path) -> None:
    """Else the next step would write the old masters over them."""
    written = step_of(momentum)
    first, shards = cluster_of(written, "fsdp=2,numerics=safe")
    for _ in range(3):
        first.step({"x": batch()})
    checkpoint.save(shards, tmp_path, step=3, seed=0)
    second, others = cluster_of(written, "zero1=2,numerics=safe")
    with warnings.catch_warnings():
        warnings.simplefilter("error", DiagnosticWarning)
        checkpoint.load(others, tmp_path, state=False)
    for name, tensor in first.full_parameters().items():
        assert torch.equal(second.full_state()[f"{name}/master"], tensor.float())
        assert not second.full_state()[f"{name}/momentum_buffer"].any()


def test_an_entry_of_that_name_that_an_optimizer_has_is_its_own() -> None:
    written = step_of(adamw)
    names = losing_weights(written)
    own = f"{min(names)}/master"
    other = replace(
        written,
        state={**written.state, own: TensorSpec((1,), torch.float32)},
        state_init={**written.state_init, own: 0.0},
    )
    assert losing_weights(other) == names - {min(names)}
    assert not other.begins_as_its_parameter(own)


@pytest.mark.parametrize(("plan", "share"), [("ddp=2", 1.0), ("zero1=2", 0.5), ("fsdp=2", 0.5), ("pp=2,micro=2", 0.5)])
def test_masters_are_counted(plan: str, share: float) -> None:
    """4 bytes for each master, and 2 more for each moment, which are in fp32 then, wherever they lie."""
    written = step_of(adamw)

    def state(numerics: str) -> int:
        made = preset(f"{plan},numerics={numerics}", written, 2)
        return predict_step(written, made, preset_cluster("h100x2")).memory.by_kind["optimizer state"]

    added = state("safe") - state("as-written")
    assert added == pytest.approx(8 * share * sum(p.numel() for p in Net().parameters()), rel=0.01)


def test_the_planner_counts_them() -> None:
    written = step_of(adamw)

    def state(numerics: str) -> int:
        limits = Limits(0, parse_pins(["ddp=2", f"numerics={numerics}"]), 4)
        found = plan_program(written, preset_cluster("h100x2"), limits=limits, precision=HALF)
        return found.prediction.memory.by_kind["optimizer state"]

    assert state("safe") - state("as-written") == 8 * sum(p.numel() for p in Net().parameters())


def test_an_artefact_keeps_them(tmp_path: Path) -> None:
    written = step_of(adamw)
    compiled = compile_plan(written, preset("fsdp=2,numerics=safe", written))
    read = read_artefact(write_artefact(compiled, tmp_path / "build", SOURCE, TRAIN)).rank_program
    first, second = (VirtualCluster(one, from_module(Net())) for one in (compiled, read))
    for cluster in (first, second):
        cluster.step({"x": batch()})
    assert any(name.endswith("/master") for name in first.full_state())
    for name, tensor in first.full_state().items():
        assert torch.equal(second.full_state()[name], tensor)


@pytest.mark.parametrize("clip", [None, 0.5])
def test_gradients_that_come_in_fp32_stay_so(clip: float | None) -> None:
    """They are rounded to the dtype of a weight for an optimizer in that dtype alone."""
    model = Net()
    written = capture(model, {"x": batch()}, adamw(model), None, clip, precision=Precision("bf16", "bf16", "fp32"))
    names = losing_weights(written)
    assert names == set(weights())
    compiled = compile_plan(written, preset("fsdp=2,micro=2,numerics=safe", written))
    cluster = VirtualCluster(compiled, from_module(Net()), keep_gradients=True)
    wide = rounded_net()
    optimizer = adamw(wide)
    for _ in range(STEPS):
        cluster.step({"x": batch()})
        for name, p in wide.named_parameters():
            p.grad = cluster.full_gradients()[name].float()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(wide.parameters(), clip)
        optimizer.step()
        for name, p in wide.named_parameters():
            assert torch.allclose(cluster.full_state()[f"{name}/master"], p, rtol=1e-6, atol=1e-8), name


@pytest.mark.parametrize("plan", ["fsdp=2", "pp=2,micro=2"])
def test_what_clips_is_not_rounded_for_masters_beside_weights_without(plan: str) -> None:
    """All weights read one factor, which is rounded for those in half precision alone."""

    def made(model: nn.Module) -> torch.optim.Optimizer:
        groups = ((model.layers[0], 1e-5), (model.layers[1], 1.0))
        return torch.optim.AdamW([{"params": list(layer.parameters()), "lr": lr} for layer, lr in groups])

    model = Net()
    written = capture(model, {"x": batch()}, made(model), None, 0.5, precision=HALF)
    names = losing_weights(written)
    assert names and names < set(weights())
    compiled = compile_plan(written, preset(plan + ",numerics=safe", written))
    cluster = VirtualCluster(compiled, from_module(Net()), keep_gradients=True)
    wide = rounded_net()
    optimizer = made(wide)
    for _ in range(STEPS):
        cluster.step({"x": batch()})
        for name, p in wide.named_parameters():
            p.grad = cluster.full_gradients()[name].float()
        torch.nn.utils.clip_grad_norm_(wide.parameters(), 0.5)
        optimizer.step()
        for name, p in wide.named_parameters():
            if name in names:
                # of the moment: Adam divides the factor out of its updates
                assert torch.allclose(
                    cluster.full_state()[f"{name}/exp_avg"], optimizer.state[p]["exp_avg"], rtol=1e-4
                ), name
