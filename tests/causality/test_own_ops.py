"""Every op of Meshwright's own has an exact rule: what it says an element depends on is what changes it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

import meshwright.compiler.graph.ops  # noqa: F401  # registers them
from meshwright.compiler.causality.interpreter import Interpreter
from meshwright.compiler.causality.memory import Memory
from meshwright.compiler.causality.registry import find_replacement, find_rule
from meshwright.compiler.causality.shadow import Shadow
from meshwright.compiler.causality.words import single, unpack, width_of
from meshwright.compiler.graph.ops.library import KERNELS

TRIES = 60
"""Times that each element is drawn anew, each time beside other values of all the rest."""


@dataclass(frozen=True)
class Case:
    """An op with arguments that are drawn anew; tensors whose places in the list are in ``fixed`` are known."""

    draw: Callable[[], list[Any]]
    fixed: tuple[int, ...] = ()


def real(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


def below(high: int, *shape: int) -> Tensor:
    return torch.randint(high, shape)


def attention_inputs() -> list[Any]:
    """Two queries, at positions 1 and 2: one that sees a single key does not depend on it."""
    return [real(1, 1, 2, 2), real(1, 1, 3, 2), real(1, 1, 3, 2)]


FORM = [True, 0, 0.7, 0.0, 0, [1, 1, 3, 3], [0, 0, 1, 0]]
CASES: dict[str, Case] = {
    "routed_mm": Case(lambda: [real(4, 2), real(3, 2, 2), below(4, 4) - 1]),
    "routed_mm, known choices": Case(lambda: [real(4, 2), real(3, 2, 2), torch.tensor([2, 0, 2, -1])], (2,)),
    "routed_outer": Case(lambda: [real(3, 2), real(3, 2), below(3, 3), 3]),
    "routed_outer, known choices": Case(lambda: [real(3, 2), real(3, 2), torch.tensor([2, 0, 2]), 3], (2,)),
    "grouped_mm": Case(lambda: [real(4, 2), real(2, 2, 2), torch.tensor([1, 4])], (1, 2)),
    "grouped_outer": Case(lambda: [real(4, 2), real(4, 2), torch.tensor([1, 4])], (2,)),
    "grouped_outer, computed ends": Case(lambda: [real(3, 2), real(3, 2), below(4, 1)]),
    "count": Case(lambda: [below(3, 4), 3]),
    "embedding": Case(lambda: [real(3, 2), below(3, 2), 0, -1]),
    "embedding_backward": Case(lambda: [real(3, 2), below(3, 3), 3, 0, -1]),
    "embedding_backward, a shard": Case(lambda: [real(3, 2), below(5, 3), 3, 1, 2]),
    "embedding_backward, known": Case(lambda: [real(3, 2), torch.tensor([0, 2, 0]), 3, 0, 0], (1,)),
    "einsum": Case(lambda: ["ab,bc->ac", real(2, 3), real(3, 2)]),
    "logsumexp": Case(lambda: [real(2, 3)]),
    "pick": Case(lambda: [real(2, 3), below(3, 2), 0]),
    "cross_entropy": Case(lambda: [real(2, 3), below(3, 2)]),
    "cross_entropy_backward": Case(lambda: [real(2), real(2, 3), below(3, 2), real(2), 0]),
    "cross_entropy_backward, a shard": Case(lambda: [real(2), real(2, 3), below(6, 2), real(2), 2]),
    "rms_norm": Case(lambda: [real(2, 3), [3], real(3), 1e-5]),
    "rms_norm_backward": Case(lambda: [real(2, 3), real(2, 3), [3], real(2, 1), real(3)]),
    "constant": Case(lambda: [real(2, 3)]),
    "dropout": Case(lambda: [real(2, 3), torch.tensor([1, 2]), 0.0, 0, [], []], (1,)),
    "total": Case(lambda: [[real(), real()]]),
    "sum_of_squares": Case(lambda: [real(2, 3)]),
    "attention": Case(lambda: [*attention_inputs(), None, None, *FORM]),
    "attention_backward": Case(
        lambda: [real(1, 1, 2, 2), *attention_inputs(), None, None, real(1, 1, 2, 2), real(1, 1, 2), *FORM]
    ),
    "to_device": Case(lambda: [real(2, 3), torch.zeros(1)], (1,)),
    "to_host": Case(lambda: [torch.zeros(2, 3, dtype=torch.float64), real(2, 3)], (0,)),
}


def test_every_op_has_a_rule() -> None:
    """One without joins all that it is given."""
    without = [n for n in KERNELS if not (find_rule(f"meshwright.{n}.default") or find_replacement(f"meshwright.{n}"))]
    assert not without
    assert {name.partition(",")[0] for name in CASES} == set(KERNELS)


def tensors(values: Any) -> list[Tensor]:
    if isinstance(values, Tensor):
        return [values]
    return [t for v in values for t in tensors(v)] if isinstance(values, list | tuple) else []


def called(name: str, values: list[Any]) -> Tensor:
    """All results in one line."""
    op = getattr(torch.ops.meshwright, name.partition(",")[0]).default
    return torch.cat([t.double().flatten() for t in tensors(op(*values))])


def varied(case: Case, values: list[Any]) -> list[Tensor]:
    return [t for i, v in enumerate(values) if i not in case.fixed for t in tensors(v)]


def said(name: str, case: Case) -> Tensor:
    """``[results, inputs]``: what the rule says that each element depends on."""
    values = case.draw()
    count = sum(t.numel() for t in varied(case, values))
    width = width_of(count + 1)
    memory = Memory(width, frozenset())
    bit = 0
    for tensor in varied(case, values):
        words = torch.stack([single(bit + i, width) for i in range(tensor.numel())]).reshape(*tensor.shape, width)
        memory.write(tensor, Shadow(torch.zeros(tensor.shape, dtype=torch.bool), words))
        bit += tensor.numel()
    mode = Interpreter(memory, True, range(count, count + 1))
    op = getattr(torch.ops.meshwright, name.partition(",")[0]).default
    with torch.no_grad(), mode:
        made = tensors(op(*values))
    assert not mode.notes.unknown
    rows = []
    for one in made:
        shadow = mode.listings.settle(memory.read(one), one)
        words = torch.zeros(width, dtype=torch.int64) if shadow.deps is None else shadow.deps
        rows.append((unpack(words.expand(*one.shape, width)[..., : width // 2]) > 0).reshape(one.numel(), -1))
    return torch.cat(rows)[:, :count]


def shown(name: str, case: Case) -> Tensor:
    """``[results, inputs]``: which elements change with which."""
    seen: Tensor | None = None
    for _ in range(TRIES):
        values, others = case.draw(), case.draw()
        before = called(name, values)
        pairs = zip(varied(case, values), varied(case, others), strict=True)
        flat = [(t, i, o) for t, o in pairs for i in range(t.numel())]
        columns = []
        for tensor, place, other in flat:
            kept = tensor.view(-1)[place].clone()
            tensor.view(-1)[place] = other.view(-1)[place]
            columns.append((called(name, values) - before).abs() > 1e-12)
            tensor.view(-1)[place] = kept
        found = torch.stack(columns, 1)
        seen = found if seen is None else seen | found
    assert seen is not None
    return seen


@pytest.mark.parametrize("name", CASES)
def test_a_rule_says_what_is(name: str) -> None:
    torch.manual_seed(0)
    claimed, real_ones = said(name, CASES[name]), shown(name, CASES[name])
    assert not bool((real_ones & ~claimed).any()), "something changes of which the rule does not know"
    assert not bool((claimed & ~real_ones).any()), "the rule says more than is"


def test_rows_of_no_group_spoil_no_other() -> None:
    x, weight, group = real(4, 2), real(3, 2, 2), torch.tensor([1, -1, 0, 5])
    out = torch.ops.meshwright.routed_mm(x, weight, group)
    torch.testing.assert_close(out, torch.stack([x[0] @ weight[1], x[1] * 0, x[2] @ weight[0], x[3] * 0]))
