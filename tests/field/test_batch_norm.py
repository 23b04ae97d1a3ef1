"""Batch normalisation: statistics of the whole batch over all ranks and, where that is declared, all microbatches."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch import Tensor, nn

from meshwright.compiler.diagnostics import MeshwrightError, Origin
from meshwright.compiler.passes.presets import preset
from tests.field.against_one_device import Case, cluster_of, difference


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 6)
        self.norm = nn.BatchNorm1d(6)
        self.second = nn.Linear(6, 3)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        y = self.norm(self.first(x))
        return nn.functional.cross_entropy(self.second(y.relu()), target)


class Images(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)

    def forward(self, x: Tensor) -> Tensor:
        return (self.norm(self.conv(x)).relu() ** 2).mean()


def classifier() -> Case:
    torch.manual_seed(0)
    # samples of different ranks lie apart, so that local statistics would be far off
    offset = torch.arange(8, dtype=torch.float64)[:, None]
    batches = [
        {"x": torch.randn(8, 5, dtype=torch.float64) + offset, "target": torch.randint(3, (8,))} for _ in range(2)
    ]
    return Case(Classifier().double(), batches)


def images() -> Case:
    torch.manual_seed(0)
    offset = torch.arange(8, dtype=torch.float64)[:, None, None, None]
    return Case(Images().double(), [{"x": torch.randn(8, 2, 4, 4, dtype=torch.float64) + offset} for _ in range(2)])


@pytest.mark.parametrize("plan", ["ddp=4", "fsdp=4", "ddp=2,fsdp=2"])
@pytest.mark.parametrize("make", [classifier, images])
def test_global_statistics(make: object, plan: str) -> None:
    """Gradients, weights, and the running statistics, which are buffers."""
    made = make()  # type: ignore[operator]  # a factory of cases
    assert difference(made, plan) < 1e-11


@pytest.mark.parametrize(("plan", "ranks"), [("ddp=2,micro=2", 2), ("fsdp=2,micro=4", 2), ("ddp=4,micro=2", 4)])
@pytest.mark.parametrize("make", [classifier, images])
def test_global_statistics_over_microbatches(make: object, plan: str, ranks: int) -> None:
    made = make()  # type: ignore[operator]  # a factory of cases
    assert difference(made, preset(f"{plan},separability=global", made.program), ranks) < 1e-11


def test_statistics_are_those_of_merged_groups() -> None:
    """Groups of n samples, each with its mean and M2 (the sum of squared distances from it), merged by the formula."""
    one = classifier()
    cluster = cluster_of(one, preset("ddp=2,micro=2,separability=global", one.program), 2)
    before = {name: b.clone() for name, b in cluster.full_buffers().items()}
    first = one.model.first
    with torch.no_grad():
        groups = first(one.batches[0]["x"]).split([2, 2, 2, 2])
    n, mean, m2 = 0, torch.zeros(6, dtype=torch.float64), torch.zeros(6, dtype=torch.float64)
    for group in groups:
        count, distance = len(group), group.mean(0) - mean
        m2 = m2 + (group - group.mean(0)).square().sum(0) + distance.square() * n * count / (n + count)
        mean = mean + distance * count / (n + count)
        n += count
    cluster.step(one.batches[0])
    after = cluster.full_buffers()
    torch.testing.assert_close(after["norm.running_mean"], 0.9 * before["norm.running_mean"] + 0.1 * mean)
    torch.testing.assert_close(after["norm.running_var"], 0.9 * before["norm.running_var"] + 0.1 * m2 / (n - 1))


def test_microbatches_are_refused_at_the_users_line() -> None:
    with pytest.raises(MeshwrightError) as caught:
        cluster_of(classifier(), "ddp=4", microbatches=2)
    (found,) = caught.value.diagnostics
    assert found.code == "E0305"
    assert isinstance(found.place, Origin) and found.place.file == __file__
    lines, first = inspect.getsourcelines(Classifier.forward)
    assert found.place.text == lines[found.place.line - first].strip() == "y = self.norm(self.first(x))"
    assert found.place.module == "norm"
