"""Ops that work piece by piece give what they give at once."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from meshwright.compiler.graph.ops import pieces

OURS = torch.ops.meshwright
SEED = torch.tensor([3, 7])


def logits() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(4, 5, 6, generator=generator).bfloat16(), torch.randint(6, (4, 5), generator=generator)


def entropy() -> Tensor:
    x, target = logits()
    total: Tensor = OURS.logsumexp(x)
    made: Tensor = OURS.cross_entropy_backward(torch.arange(20.0).view(4, 5), x, target, total, 0)
    return made


@pytest.mark.parametrize(
    "op",
    [
        lambda: OURS.logsumexp(logits()[0]),
        lambda: OURS.logsumexp(logits()[0][0, 0]),
        entropy,
        lambda: OURS.dropout(torch.ones(5, 4, 3), SEED, 0.4, 2, [], []),
        lambda: OURS.dropout(torch.ones(5, 4, 3), SEED, 0.4, 2, [10, 8, 3], [5, 4, 0]),
        lambda: OURS.dropout(torch.ones(3), SEED, 0.4, 2, [], []),
    ],
)
@pytest.mark.parametrize("elements", [1, 13])
def test_pieces_make_the_same_whole(op: Callable[[], Tensor], elements: int, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = op()
    monkeypatch.setattr(pieces, "ELEMENTS", elements)
    assert torch.equal(op(), whole)


def test_the_largest_piece() -> None:
    assert pieces.largest((4, 5, 6), 1) == 120
    assert pieces.largest((1 << 13, 1 << 12), 1) == pieces.ELEMENTS
    assert pieces.largest((2, 1 << 25), 1) == 1 << 25
    assert list(pieces.pieces(5, 1 << 23)) == [(0, 2), (2, 4), (4, 5)]
