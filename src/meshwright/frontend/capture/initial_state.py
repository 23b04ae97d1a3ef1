"""What an optimizer's state is before the first step: found by running a tiny real twin of it.

Optimizers make their state within the first step, so it is never seen unused. A step with zero
parameters and zero gradients leaves moments as they were made, which gives candidates; a candidate counts
only if a step from it and a step from no state at all give the same numbers.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from meshwright.compiler.diagnostics import error
from meshwright.frontend.capture.twin import twin


def initial_state(
    optimizer: torch.optim.Optimizer, group: int, shapes: Sequence[tuple[int, ...]]
) -> dict[int, dict[str, float]]:
    """For each number of dims among the shapes: the value that fills each entry of the state.

    Raises E0253 if no constant fill is the state before the first step.
    """
    made: dict[int, dict[str, float]] = {}
    for rank in sorted({len(s) for s in shapes}):
        made[rank] = _for_rank(optimizer, group, rank)
    return made


def _step(
    optimizer: torch.optim.Optimizer, group: int, parameter: Tensor, grad: Tensor, state: dict[str, Tensor] | None
) -> tuple[Tensor, dict[str, Tensor]]:
    """The parameter and state after one real step."""
    parameter = torch.nn.Parameter(parameter.clone())
    parameter.grad = grad.clone()
    one = twin(optimizer, {group: [parameter]}, lambda _index, _group: {})
    if state is not None:
        one.state[parameter] = {name: value.clone() for name, value in state.items()}
    one.step()
    after = one.state[parameter]
    for name, value in after.items():
        if value is not None and not isinstance(value, Tensor):
            raise error(
                "E0253",
                f"{type(optimizer).__name__} keeps '{name}' as a Python {type(value).__name__} in its state",
                action="keep state in tensors, or use an optimizer of torch.optim",
            )
    return parameter.detach(), {n: v for n, v in after.items() if v is not None}


def _for_rank(optimizer: torch.optim.Optimizer, group: int, rank: int) -> dict[str, float]:
    generator = torch.Generator().manual_seed(0)
    shape = (3, 2, 4, 2, 3)[:rank] if rank <= 5 else (2,) * rank
    zero = torch.zeros(shape, dtype=torch.float64)
    start = torch.randn(shape, dtype=torch.float64, generator=generator)
    grad = torch.randn(shape, dtype=torch.float64, generator=generator)
    _, still = _step(optimizer, group, zero, zero, None)
    wanted = _step(optimizer, group, start, grad, None)
    choices = [_candidates(name, value) for name, value in still.items()]
    for values in itertools.product(*choices):
        state = {n: torch.full_like(t, v) for (n, t), v in zip(still.items(), values, strict=True)}
        if _equal(_step(optimizer, group, start, grad, state), wanted):
            return dict(zip(still, values, strict=True))
    raise error(
        "E0253",
        f"{type(optimizer).__name__} treats its first step apart from the others (state: {', '.join(still)})",
        action="choose settings without this (dampening=0 for SGD), or another optimizer",
    )


def _candidates(name: str, value: Tensor) -> list[float]:
    found = [float(value.flatten()[0])] if value.numel() and bool((value == value.flatten()[0]).all()) else []
    if name == "step":
        found = [0.0, *found]
    return list(dict.fromkeys([*found, 0.0, 1.0]))


def _equal(one: tuple[Tensor, dict[str, Tensor]], two: tuple[Tensor, dict[str, Tensor]]) -> bool:
    if one[1].keys() != two[1].keys():
        return False
    pairs = [(one[0], two[0]), *((one[1][n], two[1][n]) for n in one[1])]
    return all(torch.allclose(a.double(), b.double(), rtol=1e-12, atol=1e-14) for a, b in pairs)
