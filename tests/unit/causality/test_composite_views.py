"""Ops that return a view where they can, and a copy where they cannot: a copy has its shadow too."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from meshwright.compiler.causality.interpreter import Interpreter
from meshwright.compiler.causality.memory import Memory
from meshwright.compiler.causality.shadow import Shadow, constant
from meshwright.compiler.graph import ops  # noqa: F401  (registers the ops)


def seen(memory: Memory, shape: tuple[int, ...]) -> Tensor:
    """A tensor each of whose elements depends on a token of its own."""
    value = torch.randn(shape)
    words = (1 << torch.arange(value.numel())).reshape(*shape, 1).expand(*shape, 2)
    memory.write(value, Shadow(torch.zeros(shape, dtype=torch.bool), words.contiguous()))
    return value


@pytest.mark.parametrize("layout", [False, True], ids=["as it lies", "turned round"])
def test_products_below_a_composed_op(layout: bool) -> None:
    memory = Memory(2)
    x = seen(memory, (2, 3, 4))
    weight = torch.randn(4, 2, 3)
    memory.write(weight, constant(weight.shape, False))
    with Interpreter(memory), torch.no_grad():
        given = x.transpose(0, 1).contiguous().transpose(0, 1) if layout else x
        made = torch.ops.meshwright.einsum.default("btd,dhc->bthc", given, weight)
    found = memory.read(made)
    assert found.deps is not None
    expected = torch.stack([1 << torch.arange(24).reshape(2, 3, 4)[..., d] for d in range(4)]).sum(0)
    assert torch.equal(found.deps[..., 0], expected[..., None, None].expand(2, 3, 2, 3))


def test_a_reshape_that_copies() -> None:
    memory = Memory(2)
    x = seen(memory, (2, 3))
    with Interpreter(memory), torch.no_grad():
        made = torch.ops.aten.reshape.default(x.t(), [6])
    assert memory.read(made).deps is not None
    assert torch.equal(memory.read(made).deps[:, 0], (1 << torch.arange(6)).reshape(2, 3).t().reshape(6))  # type: ignore[index]  # there, as was asserted
