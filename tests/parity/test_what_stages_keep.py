"""What stages keep of a microbatch: views of what has come, numbers, and values that several stages of a rank make.

Models that read an early layer again at the end, mask what they drop, and couple samples or do not.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.compiler.emit.artefact import read_artefact, write_artefact
from meshwright.compiler.graph.pipeline_program import PipelineProgram
from meshwright.compiler.passes.pipeline import compile_plan
from meshwright.compiler.passes.presets import preset
from meshwright.runtime.materialize import from_module
from meshwright.runtime.virtual import VirtualCluster
from meshwright.verification import verify
from tests.field.against_one_device import Case, eager, train
from tests.unit.separability.test_rounds import SOURCE, TRAIN

WIDTH = 5


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))


class ReadAgain(Layers):
    """Attends to what its first layer has made, which later stages have as a view of what came to them."""

    def forward(self, x: Tensor) -> Tensor:
        first = x = self.layers[0](x).tanh()
        for layer in self.layers[1:]:
            x = x + layer(x).tanh()
        return (x @ first.transpose(1, 2)).softmax(-1).square().mean()


class Contrasted(Layers):
    """The same over the batch, with a label for each sample."""

    def forward(self, x: Tensor) -> Tensor:
        first = x = self.layers[0](x[:, 0]).tanh()
        for layer in self.layers[1:]:
            x = x + layer(x).tanh()
        return F.cross_entropy(x @ first.T, torch.arange(x.shape[0]))


class Masked(Layers):
    """A mask that is cast once, and read by the statistics of all layers."""

    def forward(self, x: Tensor, counts: Tensor) -> Tensor:
        here = counts[:, None, None].to(x.dtype)
        for layer in self.layers:
            x = x + layer(x).tanh()
            x = (x - (x * here).sum(0) / here.sum()) * here
        return x.square().sum()


class Dropping(Layers):
    """What is dropped hangs on where a microbatch begins."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = F.dropout(x, 0.2)
            x = x + layer(x).tanh()
            x = x - x.mean(0)
        return x.square().mean()


def case_of(model: type[nn.Module]) -> Case:
    torch.manual_seed(0)
    batches: list[dict[str, Tensor]] = [{"x": torch.randn(8, 3, WIDTH, dtype=torch.float64)} for _ in range(2)]
    if model is Masked:
        batches = [{**batch, "counts": torch.arange(8) % 3 > 0} for batch in batches]
    return Case(model().double(), batches)


def compiled(one: Case, plan: str) -> PipelineProgram:
    made = compile_plan(one.program, preset(plan + ",separability=global", one.program))
    assert isinstance(made, PipelineProgram)
    return made


PLANS = [
    "pp=2,micro=4,schedule=gpipe",
    "pp=4,micro=4,schedule=gpipe",
    "pp=2,micro=2,virtual=2,schedule=breadth-first",
    "pp=2,ddp=2,micro=4,schedule=gpipe",
]


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("model", [ReadAgain, Contrasted, Masked])
def test_numbers_are_those_of_one_device(model: type[nn.Module], plan: str) -> None:
    one = case_of(model)
    cluster = VirtualCluster(compiled(one, plan), from_module(one.model), seed=one.seed, keep_gradients=True)
    assert train(cluster, one).far_from(eager(one)) < 1e-11


@pytest.mark.parametrize("plan", PLANS[:3])
@pytest.mark.parametrize("model", [Contrasted, Dropping])
def test_what_is_kept_is_related_and_can_be_read_back(model: type[nn.Module], plan: str, tmp_path: Path) -> None:
    """A number (where a shard begins) is made in each pass; it goes from none to another."""
    one = case_of(model)
    program = compiled(one, plan)
    for stage in program.stages:
        for graph in stage.passes.values():
            values = [v for v in (*graph.signature.inputs, *graph.signature.outputs) if v.kind == "value"]
            assert not [v for v in values if v.name.startswith("offset")]
    read = read_artefact(write_artefact(program, tmp_path / "build", SOURCE, TRAIN)).rank_program
    assert verify(read, from_module(one.model), lambda step: one.batches[step], lambda _: {}, steps=1).passed


def test_a_layer_in_evaluation_beside_one_that_trains() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, 3), nn.BatchNorm1d(3))
    model[1].eval()
    one = Case(
        model.double(), [{"input": torch.randn(8, WIDTH, dtype=torch.float64)}], loss=lambda y, _: y.square().sum()
    )
    for plan in ("ddp=2", "fsdp=2,micro=2"):
        made = compile_plan(one.program, preset(plan + ",separability=global", one.program, 2))
        cluster = VirtualCluster(made, from_module(one.model), seed=one.seed, keep_gradients=True)
        assert train(cluster, one).far_from(eager(one)) < 1e-11
