"""Training against evaluation: each model that drifts is caught with its code, and nothing else is."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

import meshwright
from tests.drift import models, models_by_chance

DRIFTING: dict[str, tuple[nn.Module, str, bool]] = {
    "norm in f32 in training": (models.TrainOnlyUpcast().bfloat16(), "E0770", True),
    "product in bf16 in evaluation": (models.EvalOnlyHalf(), "E0770", True),
    "rounded in evaluation": (models.EvalOnlyRounding(), "E0770", True),
    "autocast in evaluation": (models.EvalAutocast(), "E0770", True),
    "fused attention in evaluation": (models.FusedInEval(), "E0772", True),
    "fused attention in bf16": (models.FusedInEval().bfloat16(), "E0772", True),
    "fused layer of torch": (models.FastPath(), "E0772", True),
    "another activation": (models.OtherActivation(), "E0771", False),
    "a temperature": (models.OtherScale(), "E0773", False),
    "capacity of experts": (models.Capacity(), "E0773", False),
    "a mask": (models.OtherWindow(), "E0773", False),
    "offset of positions": (models.OtherPositions(), "E0773", False),
    "a mean over other dims": (models.OtherDims(), "E0772", False),
    "dropout in evaluation": (models.DropsInEval(), "E0771", False),
    "batch norm": (models.Normed(), "W0774", False),
    "batch norm by hand": (models.HandNormed(), "W0774", False),
    "merged weights": (models.Merged(), "E0772", True),
    "another epsilon": (models.OtherEpsilon(), "E0773", False),
    "a clamp that bites": (models.Clamped(0.5), "E0771", False),
    "dropout by hand, not rescaled": (models_by_chance.Noisy("kept, not rescaled"), "E0785", False),
    "noise that is not zero on average": (models_by_chance.Noisy("added, above zero"), "E0785", False),
    "logits capped in evaluation": (models.CappedInEval(), "E0771", False),
}
"""The model, the code, and whether float64 computes the same in both modes: only rounding drifts."""


@pytest.mark.parametrize("name", DRIFTING)
def test_a_drift_is_caught_and_its_error_predicted(name: str) -> None:
    model, code, rounding = DRIFTING[name]
    found = meshwright.drift(model, models.tokens())
    assert {f.code for f in found.findings} == {code}, found.text()
    assert found.passed == code.startswith("W")
    assert found.measured is not None and found.measured_wide is not None
    assert found.measured > 0
    assert (found.measured_wide < 1e-12) == rounding
    assert 0.1 < found.predicted / found.measured < 10, found.text()


@pytest.mark.parametrize(
    "model", [models.Base(), models.Dropping(), models.Base().bfloat16()], ids=["f32", "dropout", "bf16"]
)
def test_a_model_that_does_not_drift(model: nn.Module) -> None:
    found = meshwright.drift(model, models.tokens())
    assert found.passed and not found.findings, found.text()
    assert found.measured == 0 and found.predicted == 0


def test_a_cast_that_rounds_once_either_way_is_predicted_to_cost_nothing() -> None:
    found = meshwright.drift(models.RoundedOnce().bfloat16(), models.tokens())
    assert [f.code for f in found.findings] == ["E0770"]
    assert found.predicted == 0 and found.measured == 0


def test_what_training_draws_by_chance_is_no_drift_but_said() -> None:
    found = meshwright.drift(models_by_chance.StochasticDepth(), models.tokens())
    assert found.passed and not found.findings, found.text()
    assert any("draws by chance" in one for one in found.skipped)


@pytest.mark.parametrize(
    "model",
    [models_by_chance.Noisy("kept and rescaled"), models_by_chance.Noisy("jitter"), models_by_chance.Gumbel()],
    ids=["dropout by hand", "jitter", "gumbel"],
)
def test_noise_whose_average_is_what_evaluation_computes_is_no_drift(model: nn.Module) -> None:
    found = meshwright.drift(model, models.tokens())
    assert found.passed and not found.findings, found.text()
    assert any("draws by chance" in one for one in found.skipped)


def test_rows_that_are_left_out_and_not_rescaled_are_told_with_their_average() -> None:
    (finding,) = meshwright.drift(models_by_chance.RowsNotRescaled(), models.tokens()).findings
    assert finding.code == "E0785"
    scale = float(re.findall(r"([\d.]+) times what evaluation uses", finding.render())[0])
    assert 0.3 < scale < 0.7


def test_a_clamp_that_no_element_reaches_is_a_warning() -> None:
    found = meshwright.drift(models.Clamped(100.0), models.tokens())
    assert [f.code for f in found.findings] == ["W0785"] and found.passed and found.predicted == 0


def test_what_is_no_number_is_not_compared() -> None:
    nowhere = meshwright.drift(models.NotANumber(True), models.tokens())
    assert nowhere.unknown and "finite" in nowhere.findings[0].message and "nan" not in nowhere.text()
    somewhere = meshwright.drift(models.NotANumber(False), models.tokens())
    assert somewhere.passed and not somewhere.findings, somewhere.text()


@pytest.mark.filterwarnings("ignore")
def test_a_traced_model_is_compared_as_any_other() -> None:
    layers = nn.Sequential(nn.Embedding(models.VOCABULARY, 8), nn.Linear(8, 8))
    model = torch.jit.trace(layers, models.tokens(), check_trace=False)
    found = meshwright.drift(model, models.tokens())
    assert found.passed and found.measured == 0, found.text()


def test_a_finding_names_the_line_and_both_sides() -> None:
    finding, *_ = meshwright.drift(models.OtherScale(), models.tokens()).findings
    text = finding.render()
    assert "models.py" in text and "x * (1.0 if self.training else 0.9)" in text
    assert "in training: aten.mul.Tensor with 1" in text and "in evaluation: with 0.9" in text


def test_nothing_is_raised_for_what_the_model_does() -> None:
    found = meshwright.drift(models.Failing(), models.tokens())
    assert found.unknown and not found.passed
    assert "in evaluation: ValueError: only for training" in found.text()


class _NoCopy(models.Keeping):
    def __deepcopy__(self, memo: object) -> nn.Module:
        raise TypeError("not to be copied")


@pytest.mark.parametrize("kind", [models.Keeping, _NoCopy])
def test_the_model_is_left_as_it_was(kind: type[models.Keeping]) -> None:
    model = kind().train()
    model.head.eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    places = [p.data_ptr() for p in model.parameters()]
    drawn = torch.get_rng_state()
    meshwright.drift(model, models.tokens())
    assert model.training and not model.head.training and model.embed.training
    assert model.calls == 0 and not model.tables
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert places == [p.data_ptr() for p in model.parameters()]
    assert torch.equal(drawn, torch.get_rng_state()) and torch.get_default_dtype() == torch.float32
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_a_function_that_closes_over_a_model() -> None:
    model = models.OtherScale()
    found = meshwright.drift(lambda ids: model(ids), models.tokens())
    assert {f.code for f in found.findings} == {"E0773"}, found.text()
