"""The user's own optimizer, traced: weights and state after three steps equal eager PyTorch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshwright.compiler.diagnostics import MeshwrightError
from meshwright.compiler.graph.single import run_single, widen
from meshwright.frontend.capture import capture
from tests.reference import Widened
from tests.unit.capture.against_eager import Build, close, compare


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(3, 5)
        self.two = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return (self.two(self.one(x).tanh()) ** 2).sum()


def net() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(2)
        return Net().double()


def batch() -> tuple[Tensor]:
    return (torch.randn(4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0)),)


def of(kind: type[torch.optim.Optimizer], **settings: Any) -> Build:
    return lambda m: kind(m.parameters(), **settings)


def two_groups(m: nn.Module) -> torch.optim.Optimizer:
    groups = [
        {"params": [m.one.weight, m.two.weight], "weight_decay": 0.1},
        {"params": [m.one.bias, m.two.bias], "lr": 0.5},
    ]
    return torch.optim.AdamW(groups, lr=0.1, weight_decay=0.0)


OPTIMIZERS: dict[str, Build] = {
    "AdamW": of(torch.optim.AdamW, lr=0.1, weight_decay=0.3),
    "AdamW amsgrad": of(torch.optim.AdamW, lr=0.1, amsgrad=True),
    "AdamW in groups": two_groups,
    "AdamW foreach": of(torch.optim.AdamW, lr=0.1, foreach=True),
    "Adam": of(torch.optim.Adam, lr=0.1, weight_decay=0.3),
    "Adam maximize": of(torch.optim.Adam, lr=0.1, maximize=True),
    "NAdam": of(torch.optim.NAdam, lr=0.1),
    "Adamax": of(torch.optim.Adamax, lr=0.1),
    "Adadelta": of(torch.optim.Adadelta, lr=0.1),
    "SGD": of(torch.optim.SGD, lr=0.1, weight_decay=0.1),
    "SGD momentum": of(torch.optim.SGD, lr=0.1, momentum=0.9),
    "SGD nesterov": of(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True),
    "Adagrad": of(torch.optim.Adagrad, lr=0.1, initial_accumulator_value=0.5, lr_decay=0.1),
    "RMSprop": of(torch.optim.RMSprop, lr=0.01),
    "RMSprop centered": of(torch.optim.RMSprop, lr=0.01, momentum=0.5, centered=True),
}


@pytest.fixture(autouse=True)
def counters_in_double_precision() -> Iterator[None]:
    """Eager optimizers keep counters and products of betas in the default dtype; the captured ones in float64."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizer(name: str) -> None:
    found = compare(net(), batch(), OPTIMIZERS[name], clip=0.7, steps=3)
    assert found.program.scalars and set(found.program.state_init) == set(found.program.state)
    targets = {str(n.target) for n in found.program.update.module.graph.nodes if n.op == "call_function"}
    assert not [t for t in targets if t.split(".")[1].endswith("_")], "the update writes in place"


def test_muon_beside_adamw() -> None:
    """Muon owns the matrices, AdamW the rest: two optimizers, one update. Muon's bfloat16 is widened in both."""
    model = net()

    def both(m: nn.Module) -> list[torch.optim.Optimizer]:
        muon = torch.optim.Muon([m.one.weight, m.two.weight], lr=0.1)
        return [muon, torch.optim.AdamW([m.one.bias, m.two.bias], lr=0.1)]

    program = capture(model, batch(), optimizer=both(model))
    assert program.scalars == {"0/lr": 0.1, "1/lr": 0.1}
    assert {p.name: p.group for p in program.parameters}["two.bias"] == 1
    parameters = {n: p.detach().clone() for n, p in model.named_parameters()}
    result = run_single(widen(program), parameters, {}, None, {"0": batch()[0]})
    optimizers = both(model)
    model(*batch()).backward()
    with Widened():
        for optimizer in optimizers:
            optimizer.step()
    for name, parameter in model.named_parameters():
        close(result.parameters[name], parameter.detach(), name)
    targets = [str(n.target) for n in program.update.module.graph.nodes]
    assert "meshwright.einsum.default" in targets
    assert "aten.mm.default" not in targets and "aten.addmm.default" not in targets


def test_learning_rate_is_an_input() -> None:
    model = net()
    program = capture(model, batch(), optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    parameters = {n: p.detach().clone() for n, p in model.named_parameters()}
    for rate in (0.0, 0.2):
        result = run_single(program, parameters, {}, None, {"0": batch()[0]}, scalars={"0/lr": rate})
        for name, before in parameters.items():
            close(result.parameters[name], before - rate * result.gradients[name], name)


def test_scheduled_optimizer_is_traced_too() -> None:
    """A scheduler replaces `step` on the optimizer object by one bound to it."""
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    torch.optim.lr_scheduler.StepLR(optimizer, 10)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    program = capture(model, batch(), optimizer=optimizer)
    assert program.scalars == {"0/lr": 0.1}
    assert all(torch.equal(p, before[n]) for n, p in model.named_parameters())
    assert not optimizer.state


def test_no_optimizer_leaves_weights() -> None:
    program = capture(net(), batch())
    assert not program.state and not program.scalars
    assert [v.kind for v in program.update.signature.outputs] == ["norm"]


def test_coupled_optimizer_is_traced_whole() -> None:
    """An optimizer whose step of one parameter reads the gradients of all."""

    class Coupled(torch.optim.Optimizer):
        def __init__(self, parameters: Any, lr: float) -> None:
            super().__init__(parameters, {"lr": lr})

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            for group in self.param_groups:
                norm = torch.stack([p.grad.norm() for p in group["params"]]).norm()
                for p in group["params"]:
                    p.sub_(p.grad * group["lr"] / norm)

    compare(net(), batch(), lambda m: Coupled(m.parameters(), lr=0.1))


def refused(build: Build) -> str:
    model = net()
    with pytest.raises(MeshwrightError) as caught:
        capture(model, batch(), optimizer=build(model))
    (found,) = caught.value.diagnostics
    assert found.code == "E0253" and found.action
    return found.render()


def test_optimizer_that_reads_numbers_is_refused() -> None:
    assert "Adafactor cannot be traced: it takes a Python number or decision from a tensor" in refused(
        of(torch.optim.Adafactor, lr=0.1)
    )


def test_first_step_apart_is_refused() -> None:
    text = refused(of(torch.optim.SGD, lr=0.1, momentum=0.9, dampening=0.5))
    assert "SGD treats its first step apart" in text and "dampening=0" in text


def test_foreign_parameter_is_refused() -> None:
    assert "not the model's" in refused(lambda m: torch.optim.SGD([nn.Parameter(torch.ones(3))], lr=0.1))


def test_hooks_are_refused() -> None:
    def hooked(m: nn.Module) -> torch.optim.Optimizer:
        optimizer = torch.optim.SGD(m.parameters(), lr=0.1)
        optimizer.register_step_pre_hook(lambda *_: None)
        return optimizer

    assert "step hooks" in refused(hooked)
