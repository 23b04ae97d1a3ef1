"""Compare a captured step, run on one device, with eager PyTorch on the same model in float64."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.compiler.graph.program import StepProgram
from meshwright.compiler.graph.single import StepResult, run_single
from meshwright.frontend.capture import capture
from tests.reference import CountedDropout

Build = Callable[[nn.Module], torch.optim.Optimizer]


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


@dataclass
class Compared:
    program: StepProgram
    results: list[StepResult]
    model: nn.Module
    """The eager model after the steps."""


def tensors_of(program: StepProgram, model: nn.Module) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Copies of the model's parameters by canonical name, and of its buffers."""
    parameters = {p.name: model.get_parameter(p.name).detach().clone() for p in program.parameters}
    return parameters, {n: b.clone() for n, b in model.named_buffers()}


def close(got: Tensor, want: Tensor, what: str, tolerance: float = 1e-12) -> None:
    assert got.dtype == want.dtype, what
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance, msg=lambda text: f"{what}: {text}")


def compare(
    model: nn.Module,
    batch: Any,
    build: Build = sgd,
    loss: Callable[..., Tensor] | None = None,
    eager: Callable[[nn.Module], Tensor] | None = None,
    named: Mapping[str, Tensor] | None = None,
    clip: float | None = None,
    steps: int = 2,
    seed: int = 3,
    **options: Any,
) -> Compared:
    """Run both for some steps and assert that loss, norm, gradients, weights, buffers and state agree to 1e-12.

    ``model`` is float64. ``eager(model)`` gives the eager loss (default: the model on the batch's tensors);
    ``named`` the batch by path (default: a tuple by position, a dict by key).
    """
    model = copy.deepcopy(model)
    named = named or (dict(batch) if isinstance(batch, Mapping) else {str(i): t for i, t in enumerate(batch)})
    optimizer = build(model)
    program = capture(model, batch, optimizer=optimizer, loss=loss, clip=clip, **options)
    parameters, buffers = tensors_of(program, model)
    state = None
    results: list[StepResult] = []
    for number in range(steps):
        result = run_single(program, parameters, buffers, state, named, seed, number)
        optimizer.zero_grad()
        with CountedDropout(torch.tensor([seed, number])):
            value = eager(model) if eager else _eager(model, batch)
        value.backward()
        close(result.loss, value.detach(), "loss")
        want = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        assert set(result.gradients) == set(want)
        for name, grad in want.items():
            close(result.gradients[name], grad, f"gradient of {name}")
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), float("inf") if clip is None else clip)
        close(result.norm, norm, "norm")
        optimizer.step()
        for name, parameter in model.named_parameters():
            close(result.parameters[name], parameter.detach(), f"weight {name}")
        for name, buffer in model.named_buffers():
            close(result.buffers[name], buffer, f"buffer {name}")
        parameters, buffers, state = result.parameters, result.buffers, result.state
        results.append(result)
    return Compared(program, results, model)


def _eager(model: nn.Module, batch: Any) -> Tensor:
    output = model(**batch) if isinstance(batch, Mapping) else model(*batch)
    return output if isinstance(output, Tensor) else output.loss
