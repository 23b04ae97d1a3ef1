"""N12: the initial weights depend on the mesh.

Reported: runs with another tensor-parallel degree began with other weights, since shards drew random numbers of their
own; where the variance follows the fan, it was that of the shard, and doubled the deviation on four ranks.
https://github.com/pytorch/torchtitan/issues/1750
https://github.com/pytorch/torchtitan/pull/1363
https://github.com/NVIDIA-NeMo/Megatron-Bridge/issues/5840
https://github.com/modelscope/ms-swift/pull/7944

Here a weight is drawn whole, by its name and the seed, and cut after; compared bit for bit.
"""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from meshwright.compiler.graph.program import StepProgram
from meshwright.compiler.passes.pipeline import compile_plan
from meshwright.compiler.passes.presets import preset
from meshwright.frontend.capture import capture
from meshwright.frontend.language import LoadedFile, load_text
from meshwright.frontend.source import load_source
from meshwright.runtime.materialize import from_module
from meshwright.runtime.virtual import VirtualCluster

PLANS = ["ddp=2", "fsdp=2", "fsdp=4", "tp=2", "tp=4", "fsdp=2,tp=2", "pp=2,micro=2", "pp=2,tp=2,micro=2"]

FILE = """\
axes
    b: batch
    t: time = 8
    d = 64
    h = 4, c = 16
    f = 128
    vocab = 64

def mlp(x[b t d]) -> [b t d]
    param Wq[d h c] ~ normal(0.1)
    param Wo[h c d] ~ normal(0.05)
    param W1[d f] ~ normal(0.1)
    param W2[f d] ~ normal(0.05)
    q = x * Wq -> [b h t c]
    y = attend(q, q, q, causal over t) * Wo -> [b t d]
    y + gelu(x * W1) * W2 -> [b t d]

model small(tokens: int[b t]) -> [b t vocab]
    param E[vocab d] ~ normal(0.02)
    x = E[tokens]
    repeat layers = 2
        x = x + mlp(norm(x over d))
    norm(x over d) * E -> [b t vocab]

train
    loss cross_entropy(small(tokens) over vocab, next(tokens over t))
    optimizer SGD(lr = 0.1)
    batch 8
    steps 4
    seed 7
    data random
"""


@cache
def written() -> tuple[LoadedFile, StepProgram]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "small.mw"
        path.write_text(FILE, encoding="utf-8")
        source = load_source(str(path))
    return load_text(FILE, "small.mw"), source.capture()


@pytest.mark.parametrize("plan", PLANS)
def test_a_file_begins_with_the_same_weights_on_every_mesh(plan: str) -> None:
    file, program = written()
    compiled = compile_plan(program, preset(plan, program))
    cluster = VirtualCluster(compiled, lambda name, spec: file.initial_value(name))
    found = cluster.full_parameters()
    assert found.keys() == {p.name for p in program.parameters}
    for name, weight in found.items():
        assert torch.equal(weight, file.initial_value(name)), name


def test_the_deviation_is_that_of_the_whole_tensor() -> None:
    """Of what a rank holds too: it is a part of the whole and not a draw of its own."""
    file, program = written()
    compiled = compile_plan(program, preset("tp=4", program))
    cluster = VirtualCluster(compiled, lambda name, spec: file.initial_value(name))
    name = next(n for n in cluster.holdings[0].parameters if n.endswith("W1"))
    shards = [holdings.parameters[name] for holdings in cluster.holdings]
    assert all(shard.shape == (64, 32) for shard in shards)
    assert all(shard.std().item() == pytest.approx(0.1, rel=0.1) for shard in shards)
    assert len({shard.sum().item() for shard in shards}) == 4


class Fan(nn.Module):
    """Weights whose deviation follows their fan, drawn by torch before the mesh is known."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(64, 64)
        self.down = nn.Linear(64, 64)
        nn.init.xavier_normal_(self.up.weight)
        nn.init.kaiming_normal_(self.down.weight)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.down(torch.relu(self.up(x))).square().mean()
        return made


@pytest.mark.parametrize("plan", ["ddp=2", "fsdp=4", "tp=2", "tp=4", "fsdp=2,tp=2"])
def test_a_module_keeps_its_weights_bit_for_bit(plan: str) -> None:
    torch.manual_seed(0)
    model = Fan()
    program = capture(model, {"x": torch.zeros(8, 64)}, torch.optim.SGD(model.parameters(), lr=0.1))
    cluster = VirtualCluster(compile_plan(program, preset(plan, program)), from_module(model))
    for name, weight in cluster.full_parameters().items():
        assert torch.equal(weight, model.get_parameter(name))
