"""Rules say of each element on which inputs it depends, checked by changing one input after another."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from meshwright.compiler.causality.interpreter import Interpreter
from meshwright.compiler.causality.memory import Memory
from meshwright.compiler.causality.relation import plainly
from meshwright.compiler.causality.shadow import Shadow
from meshwright.compiler.causality.words import BITS, single, unpack, width_of

N = 24
LOW = torch.ones(4, 4, dtype=torch.float64).tril()
INF = float("inf")

FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda x: x.view(4, 6).sum(1),
    "known zero": lambda x: x.view(4, 6) * torch.tensor([1.0, 0, 1, 0, 0, 1]),
    "known infinity": lambda x: x.view(6, 4) + torch.tensor([0.0, -INF, 0.0, INF]),
    "masked product": lambda x: LOW @ x.view(4, 6),
    "product with masked": lambda x: (x.view(4, 6)[:, :4] * LOW) @ x.view(4, 6),
    "softmax": lambda x: x.view(4, 6).softmax(0),
    "masked softmax": lambda x: x.view(4, 6)[:, :4].masked_fill(torch.ones(4, 4).tril(1) == 0, -INF).softmax(-1),
    "cumsum": lambda x: x.view(4, 6).cumsum(0),
    "cumprod and flip": lambda x: x.view(2, 12).flip(1).cumprod(1),
    "convolution": lambda x: F.conv1d(x.view(2, 2, 6), torch.ones(4, 1, 3), stride=2, padding=1, groups=2),
    "dilated convolution": lambda x: F.conv1d(x.view(1, 2, 12), torch.ones(1, 2, 3), dilation=3),
    "transposed convolution": lambda x: F.conv_transpose1d(x.view(1, 2, 12), torch.ones(2, 1, 2), stride=2),
    "kernel with zeros": lambda x: F.conv1d(x.view(1, 2, 12), torch.tensor([[[1.0, 0, 1], [0, 0, 1]]])),
    "two dims": lambda x: F.conv2d(x.view(1, 1, 4, 6), torch.ones(2, 1, 2, 3), padding=(1, 0)),
    "average pool": lambda x: F.avg_pool1d(x.view(1, 2, 12), 3, 2, 1),
    "group norm": lambda x: F.group_norm(x.view(2, 4, 3), 2),
    "layer norm": lambda x: F.layer_norm(x.view(4, 6), (6,)),
    "known index": lambda x: x.view(4, 6)[torch.tensor([2, 0, 2])],
    "known gather": lambda x: x.view(4, 6).gather(1, torch.tensor([[1], [0], [5], [2]])),
    "known scatter": lambda x: torch.zeros(4, 9).scatter_add(1, torch.arange(6).expand(4, 6) % 3, x.view(4, 6)),
    "index_add": lambda x: torch.zeros(3, 6).index_add(0, torch.tensor([0, 2, 0, 1]), x.view(4, 6)),
    "put": lambda x: torch.zeros(4, 6).index_put((torch.tensor([0, 3]), torch.tensor([1, 1])), x[:2]),
    "roll and pad": lambda x: F.pad(x.view(4, 6).roll(2, 1), (1, -2)),
    "where": lambda x: torch.where(LOW.bool(), x[:16].view(4, 4), x[8:].view(4, 4)),
    "written in parts": lambda x: _written(x),
    "triangular solve": lambda x: torch.linalg.solve_triangular(torch.eye(4) + LOW * 0.1, x.view(4, 6), upper=False),
    "tril": lambda x: x[:16].view(4, 4).tril(),
    "unfold": lambda x: x.unfold(0, 4, 3).sum(1),
    "fourier": lambda x: torch.fft.rfft(x.view(4, 6), dim=0).abs(),
    "einsum": lambda x: torch.einsum("ij,kj->ik", x.view(4, 6), x.view(4, 6)),
    "sorted and back": lambda x: _sorted_and_back(x),
    "cat, stack, repeat": lambda x: torch.cat([torch.stack([x[:3], x[3:6]]), x[6:12].view(2, 3).repeat(1, 2)], 1),
}


def _written(x: Tensor) -> Tensor:
    made = torch.zeros(4, 6)
    made[1] = x[:6]
    made[:, 2] += x[6:10]
    made[1:3, 4:].mul_(x[10])
    return made


def _sorted_and_back(x: Tensor) -> Tensor:
    order = x.argsort()
    return torch.zeros_like(x).scatter(0, order, x[order].tanh())


def dependence(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """``[*result, inputs]`` as the rules say."""
    width = width_of(N)
    memory = Memory(width)
    memory.write(x, Shadow(torch.zeros(N, dtype=torch.bool), torch.stack([single(i, width) for i in range(N)])))
    interpreter = Interpreter(memory)
    with plainly(), interpreter:
        made = function(x)
    shadow = interpreter.listings.settle(memory.read(made), made)
    assert not interpreter.notes.unknown
    assert shadow.deps is not None
    return unpack(shadow.deps)[..., : BITS * (width // 2)][..., :N] > 0


def change(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Likewise as changed inputs show."""
    before = function(x.clone())
    seen = torch.zeros(*before.shape, N, dtype=torch.bool)
    for i in range(N):
        for factor in (1.001, -0.7, 3.0):
            other = x.clone()
            other[i] = other[i] * factor + 0.01
            after = function(other)
            same = (after == before) | (after.isnan() & before.isnan()) | ((after - before).abs() < 1e-12)
            seen[..., i] |= ~same
    return seen


@pytest.mark.parametrize("name", FUNCTIONS)
def test_rules_say_what_changes_show(name: str) -> None:
    default: Any = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        x = torch.rand(N, generator=torch.Generator().manual_seed(2)) + 0.5
        said, shown = dependence(FUNCTIONS[name], x.clone()), change(FUNCTIONS[name], x)
    finally:
        torch.set_default_dtype(default)
    assert not bool((shown & ~said).any()), "a dependence is missed"
    assert torch.equal(said, shown), "more is said than is so"


def test_a_clone_is_its_own() -> None:
    def written_after(x: Tensor) -> Tensor:
        base = torch.zeros(2, 12)
        base[:, :] = x.view(2, 12)
        kept = base.clone()
        base.zero_()
        return kept + base

    said = dependence(written_after, torch.rand(N))
    assert torch.equal(said.flatten(0, 1), torch.eye(N, dtype=torch.bool))
