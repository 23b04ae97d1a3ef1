"""H05: a part of the model that only some samples need, such as an encoder of images.

Reported: the encoder runs only where a batch has an image, so that its gathers hang; or it runs on nothing, and weight
decay acts on weights that got no data.
https://github.com/pytorch/torchtitan/pull/4777
https://github.com/nvidia-cosmos/cosmos-rl/pull/606
https://github.com/verl-project/verl/pull/7833

Here: the encoder is in the first stages of a pipeline. It takes part in every step, and what it gives is left out where
there is no image; so its gradients are zero, and the optimizer does with these what it does on one device.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.compiler.graph.pipeline_program import PipelineProgram
from tests.field.against_one_device import Batch, Case, cluster_of, eager, train
from tests.field.stacks import SAMPLES, VOCABULARY, WIDTH, Block, adamw, batch, said_in

PIXELS = 6


class Seeing(nn.Module):
    """Words, to each of which what the tower has seen of the sample's image is added, if it has one."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Linear(PIXELS, WIDTH)
        self.tower = nn.ModuleList(Block() for _ in range(2))
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor, labels: Tensor, images: Tensor, there: Tensor) -> Tensor:
        seen = self.patch(images)
        for block in self.tower:
            seen = block(seen)
        x = self.embed(tokens) + torch.where(there[:, None], seen, 0.0)[:, None]
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def images(step: int, count: int) -> Batch:
    """A batch of which the last ``count`` samples have images."""
    drawn = torch.randn(SAMPLES, PIXELS, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
    there = torch.arange(SAMPLES) >= SAMPLES - count
    return {**batch(step), "images": drawn * there[:, None], "there": there}


def case(*counts: int) -> Case:
    torch.manual_seed(0)
    return Case(Seeing().double(), [images(step, n) for step, n in enumerate(counts)], optimizer=adamw, clip=0.5)


@pytest.mark.parametrize(
    ("plan", "ranks"), [("pp=2,fsdp=2", 4), ("pp=4,schedule=zb-h1", 4), ("pp=2,ddp=2,schedule=zb-v", 4)]
)
def test_trains_as_on_one_device(plan: str, ranks: int) -> None:
    """None has an image, then those of one rank alone, then all."""
    made = case(0, 2, SAMPLES)
    truth = eager(made)
    assert not truth.gradients[0]["tower.0.up.weight"].any() and truth.gradients[1]["tower.0.up.weight"].any()
    assert train(cluster_of(made, plan, ranks, 4), made).far_from(truth) < 1e-11


def test_the_tower_is_the_first_stage_and_words_come_later() -> None:
    program = cluster_of(case(0), "pp=2", 2, 4).rank_program
    assert isinstance(program, PipelineProgram)
    first, second = (set(stage.parameters) for stage in program.stages)
    assert {n.partition(".")[0] for n in first} == {"patch", "tower"}
    assert {n.partition(".")[0] for n in second} == {"embed", "blocks", "head"}


def test_what_is_said_does_not_depend_on_who_has_images(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = cluster_of(case(0), "pp=2,fsdp=2", 4, 4)
    said = [said_in(cluster, images(0, count), monkeypatch) for count in (0, 2, SAMPLES)]
    assert said[0] == said[1] == said[2] and all(said[0].values())
