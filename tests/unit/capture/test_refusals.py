"""What cannot be captured is refused with a code, the user's line, the reason and one action."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.compiler.diagnostics import Diagnostic, MeshwrightError, Origin
from meshwright.frontend.capture import capture


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 3


class Net(nn.Module):
    def __init__(self, function: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.function(self.linear(x))


def branch(x: Tensor) -> Tensor:
    if x.sum() > 0:  # here: branch
        return x.sum()
    return -x.sum()


def item(x: Tensor) -> Tensor:
    return x.sum() * x.max().item()  # here: item


def select(x: Tensor) -> Tensor:
    return x[x > 0].sum()  # here: select


def noise(x: Tensor) -> Tensor:
    return (x + torch.randn_like(x)).sum()  # here: noise


def bernoulli(x: Tensor) -> Tensor:
    return (x * torch.bernoulli(torch.full_like(x, 0.5))).sum()  # here: bernoulli


def function(x: Tensor) -> Tensor:
    return Double.apply(x).sum()  # here: function


def hook(x: Tensor) -> Tensor:
    x.register_hook(lambda g: g * 2)  # here: hook
    return x.sum()


def shape(x: Tensor) -> Tensor:
    return (x @ torch.ones(4, 2)).sum()  # here: shape


def fault(x: Tensor) -> Tensor:
    return {}["missing"]  # here: fault


def frequency(x: Tensor) -> Tensor:
    indices = torch.zeros(3, dtype=torch.int64)
    return F.embedding(indices, x, scale_grad_by_freq=True).sum()  # here: frequency


CASES: dict[str, tuple[Callable[[Tensor], Any], str, str]] = {
    "branch": (branch, "E0254", "takes a number or a decision from the data"),
    "item": (item, "E0254", "depends on the data"),
    "select": (select, "E0254", "depends on the data"),
    "noise": (noise, "E0251", "'randn_like' draws random numbers"),
    "bernoulli": (bernoulli, "E0251", "'bernoulli' draws random numbers"),
    "function": (function, "E0255", "'Double' is a torch.autograd.Function"),
    "hook": (hook, "E0255", "a hook on a tensor"),
    "shape": (shape, "E0258", "the model fails while it is traced"),
    "fault": (fault, "E0258", "KeyError: 'missing'"),
    "frequency": (frequency, "E0257", "scale_grad_by_freq"),
}


def refusal(function: Callable[[Tensor], Any], **options: Any) -> Diagnostic:
    with pytest.raises(MeshwrightError) as caught:
        capture(Net(function), (torch.ones(4, 3),), **options)
    (found,) = caught.value.diagnostics
    assert found.action
    return found


@pytest.mark.parametrize("name", CASES)
def test_refused_at_the_users_line(name: str) -> None:
    function, code, message = CASES[name]
    found = refusal(function)
    assert found.code == code, found.render()
    assert message in found.message
    assert isinstance(found.place, Origin)
    lines, first = inspect.getsourcelines(function)
    (want,) = (first + i for i, line in enumerate(lines) if f"# here: {name}" in line)
    assert (found.place.file, found.place.line) == (__file__, want), found.render()
    assert f"# here: {name}" in found.place.text


def test_output_without_a_loss() -> None:
    assert "gives a tensor of shape [4, 3] where a loss" in refusal(lambda x: x).message
    assert "gives a tuple where a loss" in refusal(lambda x: (x, x)).message
    assert refusal(lambda x: x).code == "E0252"
    assert "the loss function gives" in refusal(lambda x: x, loss=lambda out, batch: out).message


def test_loss_of_integers() -> None:
    found = refusal(lambda x: x.sum().long())
    assert found.code == "E0252" and "torch.int64" in found.message


def test_batches() -> None:
    def told(batch: Any, **options: Any) -> str:
        with pytest.raises(MeshwrightError) as caught:
            capture(Net(lambda x: x.sum()), batch, **options)
        assert caught.value.diagnostics[0].code == "E0256"
        return str(caught.value)

    assert "the batch is a str" in told("text")
    assert "holds no tensor" in told((1, 2))
    assert "names 'y', which is not in the batch" in told({"x": torch.ones(4, 3)}, batch_dims={"y": 0})
    assert "dim 0 of 'y' has 3 samples" in told(
        {"x": torch.ones(4, 3), "y": torch.ones(3)}, batch_dims={"x": 0, "y": 0}
    )


def test_model_is_whole_after_a_refusal() -> None:
    model = Net(branch)
    before = list(model.parameters())
    with pytest.raises(MeshwrightError):
        capture(model, (torch.ones(4, 3),))
    assert all(p is q for p, q in zip(before, model.parameters(), strict=True))
    assert model(torch.ones(4, 3)).shape == ()
    assert torch.Tensor.register_hook.__qualname__ == "Tensor.register_hook"


@torch.library.custom_op("cases::doubled", mutates_args=())
def doubled(x: Tensor) -> Tensor:
    return x * 2


@doubled.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def test_an_operator_without_a_gradient_is_told() -> None:
    with pytest.raises(MeshwrightError) as caught:
        capture(Net(lambda x: doubled(x).sum()), torch.randn(4, 3))
    (found,) = caught.value.diagnostics
    assert found.code == "E0257" and "cases.doubled" in found.message
    assert "register_autograd" in found.action


def test_recurrent_layers() -> None:
    layer = nn.LSTM(3, 3, batch_first=True)
    found = refusal(lambda x: layer(x.unsqueeze(1))[0].sum())
    assert found.code == "E0257" and "'lstm' is a fused recurrent layer" in found.message
