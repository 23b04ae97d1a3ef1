"""The reference itself must be right: float64 everywhere, and its gradients the derivative of its loss."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.models import MODELS, Variant
from tests.reference import reference_steps


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1e-5)


@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_the_derivative_of_the_loss(name: str) -> None:
    """A step of plain descent lowers the loss by lr * |gradient|^2; any float32 inside would hide so small a change."""
    example = MODELS[name](Variant(), 1)
    first, second = reference_steps(example.model, [example.batch] * 2, sgd)
    square = sum(float((g * g).sum()) for g in first.gradients.values())
    middle = sum(float((first.gradients[n] * second.gradients[n]).sum()) for n in first.gradients)
    # the trapezoid of the slopes at both ends leaves an error of third order
    assert first.loss - second.loss == pytest.approx(1e-5 * (square + middle) / 2, rel=1e-7)
    assert first.norm == pytest.approx(square**0.5, rel=1e-12)


@pytest.mark.parametrize("name", MODELS)
def test_float32_eager_agrees_to_its_own_rounding(name: str) -> None:
    example = MODELS[name](Variant(), 1)
    (step,) = reference_steps(example.model, [example.batch], sgd)
    output = example.model(**example.batch)
    loss = output if isinstance(output, torch.Tensor) else output.loss
    loss.backward()
    assert loss.item() == pytest.approx(step.loss, rel=1e-5)
    for parameter_name, parameter in example.model.named_parameters():
        torch.testing.assert_close(parameter.grad, step.gradients[parameter_name].float(), rtol=1e-3, atol=1e-5)


def test_dropout_depends_on_seed_and_step_alone() -> None:
    example = MODELS["GPT-2"](Variant(dropout=0.2), 1)
    still = lambda model: torch.optim.SGD(model.parameters(), lr=0.0)  # noqa: E731 (one expression)
    runs = [reference_steps(example.model, [example.batch] * 2, still, seed=seed) for seed in (3, 3, 4)]
    losses = [[step.loss for step in run] for run in runs]
    assert losses[0] == losses[1]
    assert len({losses[0][0], losses[0][1], losses[2][0]}) == 3
