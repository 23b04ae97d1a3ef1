"""What has no gradient in eager PyTorch has none in the captured step, also beside writes into tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.compiler.diagnostics import MeshwrightError
from meshwright.compiler.passes.compile import compile_step
from meshwright.compiler.passes.presets import preset
from meshwright.frontend.capture import capture
from meshwright.runtime.materialize import from_module
from meshwright.runtime.virtual import VirtualCluster


class Net(nn.Module):
    def __init__(self, function: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a = nn.Linear(8, 16)
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("average", torch.zeros(16))
        self.function = function
        self.double().train()

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


def unrelated_write(self: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        scale = self.a(x).mean(1, keepdim=True)
    h = self.a(x) * 2
    h += 1
    return (h * scale).pow(2).sum()


def counter(self: Any, x: Tensor) -> Tensor:
    self.count += 1
    with torch.no_grad():
        target = torch.softmax(self.a(x), -1)
    return -(target * torch.log_softmax(self.a(x), -1)).sum() * self.count


def moving_average(self: Any, x: Tensor) -> Tensor:
    h = self.a(x)
    with torch.no_grad():
        self.average.mul_(0.9).add_(h.sum(0), alpha=0.1)
    return (h * self.average).pow(2).sum()


def assigned(self: Any, x: Tensor) -> Tensor:
    h = self.a(x)
    self.average = self.average * 0.5 + h.detach().sum(0)
    return (h * self.average).sum()


def data(self: Any, x: Tensor) -> Tensor:
    return (self.a(x) * self.a.weight.data.sum(1)).pow(2).sum()


def grad_within(self: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        scale = self.a(x).sum(1, keepdim=True)
        with torch.enable_grad():
            h = self.a(x)
    h = h * 1
    h.clamp_(min=-1)
    return (h * scale).sum()


@pytest.mark.parametrize("function", [unrelated_write, counter, moving_average, assigned, data, grad_within])
def test_equals_eager(function: Callable[[Any, Tensor], Tensor]) -> None:
    x = torch.randn(4, 8, dtype=torch.float64)
    model = Net(function)
    program = capture(model, x, torch.optim.SGD(model.parameters(), lr=0.1))
    cluster = VirtualCluster(
        compile_step(program, preset("ddp=2", program)), from_module(Net(function)), keep_gradients=True
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        loss = model(x)
        loss.backward()
        found = cluster.step({"0": x})
        assert abs(found.loss - loss.item()) < 1e-9 * abs(loss.item())
        for name, gradient in cluster.full_gradients().items():
            torch.testing.assert_close(gradient, model.get_parameter(name).grad, rtol=1e-9, atol=1e-9)
        optimizer.step()
        for name, buffer in cluster.full_buffers().items():
            torch.testing.assert_close(buffer, model.get_buffer(name).detach(), rtol=1e-9, atol=1e-9)


def refused(function: Callable[[Any, Tensor], Tensor]) -> str:
    with pytest.raises(MeshwrightError) as caught:
        capture(Net(function), torch.randn(4, 8, dtype=torch.float64))
    assert caught.value.diagnostics[0].code == "E0255"
    return str(caught.value)


def test_a_write_that_breaks_gradients_is_refused() -> None:
    def halved(self: Any, x: Tensor) -> Tensor:
        h = self.a(x)
        with torch.no_grad():
            h.mul_(0.5)
        return h.pow(2).sum()

    assert "writes, without gradient, into a tensor that has one" in refused(halved)


def test_a_buffer_that_changes_its_shape_is_refused() -> None:
    def grown(self: Any, x: Tensor) -> Tensor:
        self.average = torch.cat([self.average, self.average])
        return self.a(x).sum()

    assert "'average' [16] is assigned a tensor of another type [32]" in refused(grown)


def test_dropout_in_place_changes_its_argument() -> None:
    def in_place(self: Any, x: Tensor) -> Tensor:
        h = self.a(x) * 1
        F.dropout(h, 0.3, True, True)
        return h.pow(2).sum()

    def out_of_place(self: Any, x: Tensor) -> Tensor:
        return F.dropout(self.a(x) * 1, 0.3).pow(2).sum()

    x = torch.randn(4, 8, dtype=torch.float64)
    losses = []
    for function in (in_place, out_of_place):
        model = Net(function)
        program = capture(model, x, torch.optim.SGD(model.parameters(), lr=0.1))
        rank_program = compile_step(program, preset("ddp=2", program))
        losses.append(VirtualCluster(rank_program, from_module(model)).step({"0": x}).loss)
    assert losses[0] == losses[1]


def test_a_model_without_anything_to_train_is_refused() -> None:
    model = nn.Linear(3, 2).requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(MeshwrightError) as caught:
        capture(model, torch.ones(4, 3), optimizer, lambda y, batch: y.sum())
    (found,) = caught.value.diagnostics
    assert found.code == "E0255" and "nothing to train" in found.message
