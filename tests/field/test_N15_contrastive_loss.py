"""N15: losses that couple the samples of different ranks.

Reported: gradients scaled by the number of ranks depending on which gather was used, labels built for the local
batch after gathering, or no gather at all, so that negatives were only local.
https://github.com/mlfoundations/open_clip/issues/616
https://github.com/galilai-group/stable-pretraining/pull/409
https://github.com/huggingface/transformers/issues/22252

Over ranks the gather and its transpose follow from the graph. Over microbatches, which run one after another, they
meet, if the loss is declared global; else it cannot be computed, and that is said.
"""

from __future__ import annotations

import inspect

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.compiler.diagnostics import MeshwrightError, Origin
from meshwright.compiler.passes.presets import preset
from tests.field.against_one_device import Case, cluster_of, difference


class TwoTowers(nn.Module):
    """InfoNCE over all pairs of the batch, in both directions, with a learned temperature."""

    def __init__(self) -> None:
        super().__init__()
        self.image = nn.Linear(5, 3)
        self.text = nn.Linear(7, 3)
        self.temperature = nn.Parameter(torch.tensor(1.5))

    def forward(self, image: Tensor, text: Tensor) -> Tensor:
        a = F.normalize(self.image(image), dim=-1)
        b = F.normalize(self.text(text), dim=-1)
        logits = self.temperature.exp() * a @ b.T
        target = torch.arange(logits.shape[0])
        return (F.cross_entropy(logits, target) + F.cross_entropy(logits.T, target)) / 2


def case(samples: int) -> Case:
    torch.manual_seed(0)
    model = TwoTowers().double()
    batches = [
        {
            "image": torch.randn(samples, 5, dtype=torch.float64),
            "text": torch.randn(samples, 7, dtype=torch.float64),
        }
        for _ in range(3)
    ]
    return Case(model, batches, clip=1.0)


@pytest.mark.parametrize("plan", ["ddp=4", "fsdp=4", "ddp=2,fsdp=2"])
@pytest.mark.parametrize("samples", [4, 8])
def test_the_gradient_is_that_of_the_whole_batch(plan: str, samples: int) -> None:
    assert difference(case(samples), plan) < 1e-11


def test_two_ranks_with_four_samples() -> None:
    assert difference(case(4), "ddp=2", ranks=2) < 1e-11


@pytest.mark.parametrize(("plan", "ranks"), [("ddp=2,micro=2", 2), ("fsdp=2,micro=4", 2), ("fsdp=4,micro=2", 4)])
def test_over_microbatches_that_meet(plan: str, ranks: int) -> None:
    made = case(8)
    assert difference(made, preset(f"{plan},separability=global", made.program), ranks) < 1e-11


@pytest.mark.parametrize("plan", ["ddp=4", "fsdp=4"])
def test_microbatches_are_refused_at_the_users_line(plan: str) -> None:
    with pytest.raises(MeshwrightError) as caught:
        cluster_of(case(8), plan, microbatches=2)
    (found,) = caught.value.diagnostics
    assert found.code == "E0305"
    assert "microbatches" in found.message and "microbatches = 1" in found.action
    assert isinstance(found.place, Origin) and found.place.file == __file__
    lines, first = inspect.getsourcelines(TwoTowers.forward)
    assert first <= found.place.line < first + len(lines)
    assert found.place.text == lines[found.place.line - first].strip()
    assert "a @ b.T" in found.place.text
