"""What cannot be asked about is told as what it is: dims, batches and outputs that do not fit, exits, time."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import meshwright
from meshwright.checking import Verdict
from meshwright.compiler.causality import clock

IDS = torch.randint(40, (2, 16), generator=torch.Generator().manual_seed(1))


class Sums(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(40, 8)

    def forward(self, ids: Tensor) -> Tensor:
        return self.embed(ids).cumsum(1)


class Exits(Sums):
    def forward(self, ids: Tensor) -> Tensor:
        raise SystemExit(5)


class Slow(Sums):
    seconds = 0.05

    def forward(self, ids: Tensor) -> Tensor:
        time.sleep(self.seconds)
        return super().forward(ids)


def on_meta() -> Sums:
    with torch.device("meta"):
        return Sums()


UNFIT: dict[str, tuple[Any, Any, dict[str, Any], str, str]] = {
    "no rows": (Sums(), IDS[:0], {}, "has no rows", "one or more rows"),
    "no positions": (Sums(), IDS[:, :0], {}, "has no positions", "one or more positions"),
    "no such batch dim": (Sums(), IDS, {"batch_dim": 5}, "batch_dim is 5", "batch_dim of 0 to 1"),
    "no such negative dim": (Sums(), IDS, {"batch_dim": -3}, "batch_dim is -3", "batch_dim of 0 to 1"),
    "no such time dim": (Sums(), IDS, {"time_dim": 7}, "time_dim is 7", "time_dim"),
    "one dim for both": (Sums(), IDS, {"batch_dim": 0, "time_dim": 0}, "the same dim 0", "two dims"),
    "one dim for both, told twice": (Sums(), IDS, {"batch_dim": 1, "time_dim": -1}, "the same dim 1", "two dims"),
    "batch on meta": (Sums(), IDS.to("meta"), {}, "on the meta device", "on the CPU"),
    "model on meta": (on_meta(), IDS, {}, "weights are on the meta device", "to_empty"),
    "no model": (3, IDS, {}, "of type int", "nn.Module"),
    "no tensor": (Sums(), None, {}, "holds no tensor", "give a tensor"),
    "mask alone": (lambda x: x.float(), IDS > 3, {}, "'x' is Boolean", "token ids"),
    "exits": (Exits(), IDS, {}, "it calls sys.exit(5)", "raise an exception"),
    "pooled": (lambda x: x.float().mean(1, keepdim=True), IDS, {}, "returns [2, 1] for 2 rows of 16", "rows at dim 0"),
}
"""A model, a batch, arguments, and what is said of them and of what to do."""


@pytest.mark.parametrize("name", UNFIT)
def test_what_does_not_fit_is_unknown_with_its_cause(name: str) -> None:
    model, batch, arguments, reason, action = UNFIT[name]
    for found in (meshwright.check(model, batch, **arguments), meshwright.drift(model, batch, **arguments)):
        (finding,) = found.findings
        assert finding.code in ("E0715", "E0777") and not found.passed
        assert reason in finding.message and action in finding.action, finding.render()


@pytest.mark.parametrize(
    ("segments", "reason", "action"),
    [
        (3, "segments are of type int", "the name of an input"),
        ("ids", "'ids' tells the segments", "token ids"),
        ("none", "there is no input 'none'", ""),
    ],
)
def test_segments_that_are_none(segments: Any, reason: str, action: str) -> None:
    (finding,) = meshwright.check(Sums(), IDS, segments=segments).findings
    assert finding.code == "E0715" and reason in finding.message and action in finding.action, finding.render()


def test_dims_are_counted_from_the_end_as_well() -> None:
    def leaky(x: Tensor) -> Tensor:
        return x - x.mean(0, keepdim=True)

    batch = torch.randn(16, 2, 3, generator=torch.Generator().manual_seed(0))
    assert meshwright.check(leaky, batch, batch_dim=-2, time_dim=-3).leaks == {"future"}


def test_complex_activations_are_run() -> None:
    batch = torch.randn(2, 16, 3, dtype=torch.complex64, generator=torch.Generator().manual_seed(0))
    assert meshwright.check(lambda x: x.cumsum(1), batch).passed
    assert meshwright.check(lambda x: x.flip(1).cumsum(1), batch).leaks == {"future"}


class TwoInputs(Sums):
    def forward(self, ids: Tensor, types: Tensor) -> Tensor:
        return super().forward(ids) + self.embed(types).mean(1, keepdim=True)


def test_an_input_that_is_taken_as_given_for_its_values_is_named() -> None:
    found = meshwright.check(TwoInputs(), {"ids": IDS, "types": IDS % 2})
    assert found.verdict == Verdict.ASSUMPTION and found.passed
    assert any("'types' is a mask or the like" in one for one in found.assumptions)
    assert meshwright.check(TwoInputs(), {"ids": IDS, "types": IDS % 3}).leaks == {"future"}
    assert not meshwright.check(TwoInputs(), {"ids": IDS, "types": torch.arange(16).expand(2, 16)}).assumptions


@pytest.mark.parametrize("question", [meshwright.check, meshwright.drift])
def test_a_slow_model_is_left_when_the_time_is_over(question: Any) -> None:
    begun = time.monotonic()
    found = question(Slow(), IDS, seconds=1.0)
    assert time.monotonic() - begun < 2.5
    assert found.passed, found.text()


def test_what_there_was_no_time_for_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clock, "LEAST_SECONDS", 0.0)
    slow = Slow()
    found = meshwright.check(slow, IDS, seconds=0.04)
    assert found.verdict == Verdict.UNKNOWN and "seconds" in found.findings[0].message
    assert "more seconds" in found.findings[0].action
    drifts = meshwright.drift(slow, IDS, seconds=0.04)
    assert drifts.unknown and not drifts.passed and "more seconds" in drifts.findings[0].action


def test_few_runs_make_no_leak_of_what_cancels_out() -> None:
    def by_fourier(x: Tensor) -> Tensor:
        size = x.shape[1]
        kernel = torch.exp(-torch.arange(size, dtype=x.dtype) / 3)
        both = torch.fft.rfft(x, 2 * size, dim=1) * torch.fft.rfft(kernel, 2 * size)[:, None]
        return torch.fft.irfft(both, 2 * size, dim=1)[:, :size]

    batch = torch.randn(2, 16, 3, generator=torch.Generator().manual_seed(0))
    for seconds in (20.0, 0.001):
        assert not meshwright.check(by_fourier, batch, seconds=seconds).leaks
