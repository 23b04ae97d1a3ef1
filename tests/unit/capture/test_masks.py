"""Attention masks: what depends on positions alone is settled at compile time."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from meshwright.compiler.graph.fake import fake_tensor
from meshwright.compiler.graph.program import StepProgram
from meshwright.frontend.capture import capture
from tests.unit.capture.against_eager import compare

T = 6


class Attend(nn.Module):
    """Attention under a mask made in forward."""

    def __init__(self, mask: Callable[[], Tensor] | None = None, learned: bool = False, **options: bool) -> None:
        super().__init__()
        self.qkv = nn.Linear(4, 12)
        self.mask = mask
        self.bias = nn.Parameter(torch.randn(2, T, T)) if learned else None
        self.options = options

    def forward(self, x: Tensor, data: Tensor | None = None) -> Tensor:
        b, t, _ = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, 2, 2).permute(2, 0, 3, 1, 4)
        mask = data if self.mask is None else self.mask()
        if self.bias is not None:
            mask = self.bias
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, **self.options).sin().sum()


def made(*args: object, **options: bool) -> nn.Module:
    torch.manual_seed(0)
    return Attend(*args, **options).double()  # type: ignore[arg-type]  # a test's shorthand


def batch() -> tuple[Tensor]:
    return (torch.randn(3, T, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1)),)


def positions() -> tuple[Tensor, Tensor]:
    return torch.arange(T).unsqueeze(1), torch.arange(T)


def causal() -> Tensor:
    query, key = positions()
    return key <= query


def windowed() -> Tensor:
    query, key = positions()
    return (key <= query) & (key > query - 3)


def blocks() -> Tensor:
    query, key = positions()
    return query // 2 == key // 2


def alibi() -> Tensor:
    query, key = positions()
    return (key - query).to(torch.float64) * 0.3


def as_bias(seen: Tensor, hidden: float) -> Tensor:
    return torch.zeros(T, T, dtype=torch.float64).masked_fill(~seen, hidden)


def attention(program: StepProgram) -> fx.Node:
    (node,) = (n for n in program.micro.module.graph.nodes if str(n.target) == "meshwright.attention.default")
    return node


FLAGS: dict[str, tuple[Callable[[], Tensor], bool, int]] = {
    "causal": (causal, True, 0),
    "causal for each sample": (lambda: causal().expand(3, 1, T, T), True, 0),
    "causal as a bias": (lambda: as_bias(causal(), -math.inf), True, 0),
    "causal as a bias of the smallest number": (lambda: as_bias(causal(), torch.finfo(torch.float64).min), True, 0),
    "causal by tril": (lambda: torch.tril(torch.ones(T, T)).bool(), True, 0),
    "sliding window": (windowed, True, 3),
    "all seen": (lambda: torch.ones(T, T, dtype=torch.bool), False, 0),
    "no bias": (lambda: torch.zeros(1, 1, T, T, dtype=torch.float64), False, 0),
}


@pytest.mark.parametrize("name", FLAGS)
def test_becomes_a_flag(name: str) -> None:
    mask, is_causal, window = FLAGS[name]
    program = compare(made(mask), batch()).program
    node = attention(program)
    assert (node.args[3], node.args[5], node.args[6]) == (None, is_causal, window)
    assert not program.constants


@pytest.mark.parametrize("mask", [blocks, alibi, lambda: causal().flip(0), lambda: as_bias(causal(), -1.0)])
def test_other_masks_become_constants(mask: Callable[[], Tensor]) -> None:
    program = compare(made(mask), batch()).program
    node = attention(program)
    assert isinstance(node.args[3], fx.Node) and node.args[5] is False
    (name,) = program.constants
    assert torch.equal(program.constants[name], mask())
    assert [v.name for v in program.micro.signature.inputs if v.kind == "constant"] == [name]


def test_flag_of_the_user() -> None:
    node = attention(compare(made(is_causal=True), batch()).program)
    assert (node.args[3], node.args[5]) == (None, True)


def test_mask_from_the_batch() -> None:
    """Some rows see nothing: no NaN in loss or gradients, as in eager PyTorch."""
    data = torch.rand(3, 1, T, T, generator=torch.Generator().manual_seed(3)) > 0.6
    data[1, 0, 2] = False
    node = attention(compare(made(), (*batch(), data)).program)
    assert isinstance(node.args[3], fx.Node)


def test_learned_mask_gets_its_gradient() -> None:
    found = compare(made(None, True), batch())
    assert "bias" in found.results[0].gradients
    targets = {str(n.target) for n in found.program.micro.module.graph.nodes}
    assert "meshwright.attention.default" not in targets and "aten._softmax.default" in targets


def test_grouped_queries_and_three_dims() -> None:
    class Grouped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k = nn.Linear(4, 8), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            b, t, _ = x.shape
            q, k = self.q(x).view(b, t, 4, 2).transpose(1, 2), self.k(x).view(b, t, 2, 2).transpose(1, 2)
            grouped = F.scaled_dot_product_attention(q, k, k, is_causal=True, enable_gqa=True, scale=0.7)
            return grouped.sin().sum() + F.scaled_dot_product_attention(q[:, 0], k[:, 0], k[:, 1]).sin().sum()

    torch.manual_seed(0)
    compare(Grouped().double(), batch())


def test_capture_of_a_large_mask_takes_little_memory() -> None:
    """A mask of 8 samples at 4096 positions is settled on one copy of it."""

    class Large(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(()))

        def forward(self, x: Tensor) -> Tensor:
            place = torch.arange(4096)
            mask = (place.unsqueeze(1) >= place).expand(8, 1, -1, -1)
            return F.scaled_dot_product_attention(x * self.w, x, x, attn_mask=mask).sum()

    program = capture(Large().to("meta"), (torch.empty(8, 2, 4096, 8, device="meta"),))
    assert attention(program).args[5] is True


def test_a_mask_expanded_over_a_huge_batch_is_settled_too() -> None:
    # 2**34 elements, all samples alike: what a model of the transformers library makes of a large global batch
    def expanded() -> Tensor:
        position = torch.arange(512).unsqueeze(0).expand(65536, -1)
        document = (position.diff(prepend=position[:, :1] - 1) != 1).cumsum(-1)
        seen = position[:, None, None, :] <= position[:, None, :, None]
        return seen & (document[:, None, None, :] == document[:, None, :, None])

    program = capture(Attend(expanded), (fake_tensor((65536, 512, 4), torch.float32),))
    (attention,) = (n for n in program.micro.module.graph.nodes if n.target is torch.ops.meshwright.attention.default)
    assert attention.args[3] is None
    assert attention.args[5] is True
    assert not program.constants


class Written(nn.Module):
    """Scores with a mask that is expanded over the batch."""

    def forward(self, q: Tensor) -> Tensor:
        position = torch.arange(q.shape[1]).unsqueeze(0).expand(q.shape[0], -1)
        seen = position[:, None, :] <= position[:, :, None]
        scores = (q @ q.transpose(1, 2)).masked_fill(~seen, -1e9)
        return (scores.softmax(-1) @ q).sum()


def test_a_written_mask_over_a_large_batch_is_kept_once() -> None:
    program = capture(Written(), (fake_tensor((2048, 128, 4), torch.float32),))
    (kept,) = program.constants.values()
    assert kept.shape == (1, 128, 128)
    seen = kept[0] if bool(kept[0, 0, 0]) else ~kept[0]
    assert torch.equal(seen, torch.ones(128, 128, dtype=torch.bool).tril())
