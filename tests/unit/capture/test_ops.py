"""Meshwright's own ops: gradients, shards equal to slices of the whole, statistics, fake kernels."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.library import opcheck

from meshwright.compiler.graph import ops
from meshwright.compiler.graph.ops.contraction import gradient_equation, parse

assert ops.__all__  # imported for what it registers
op = torch.ops.meshwright


def randn(*shape: int, seed: int = 0, grad: bool = True) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, dtype=torch.float64, generator=generator).requires_grad_(grad)


EQUATIONS = {
    "bti,oi->bto": ((2, 3, 4), (5, 4)),
    "bti,io->bto": ((2, 3, 4), (4, 5)),
    "bto,bti->oi": ((2, 3, 5), (2, 3, 4)),
    "bti,bto->oi": ((2, 3, 4), (2, 3, 5)),
    "bhtc,bhsc->bhts": ((2, 3, 4, 5), (2, 3, 6, 5)),
    "bhts,bhsc->bhtc": ((2, 3, 4, 5), (2, 3, 5, 6)),
    "btd,dhc->bhtc": ((2, 3, 4), (4, 2, 3)),
    "i,i->": ((4,), (4,)),
    "i,j->ij": ((4,), (3,)),
    "ab,ab->ab": ((2, 3), (2, 3)),
    "btix,oi->bto": ((2, 3, 4, 2), (5, 4)),
}


@pytest.mark.parametrize("equation", EQUATIONS)
def test_einsum(equation: str) -> None:
    a, b = (randn(*shape, seed=i) for i, shape in enumerate(EQUATIONS[equation]))
    torch.testing.assert_close(op.einsum(equation, a, b), torch.einsum(equation, a, b))
    assert op.einsum(equation, a, b).is_contiguous()
    assert torch.autograd.gradcheck(lambda x, y: op.einsum(equation, x, y), (a, b))
    opcheck(op.einsum.default, (equation, a, b))


def test_einsum_takes_operands_of_any_strides() -> None:
    a, b = randn(4, 3, 2).permute(2, 1, 0), randn(4, 5).t()
    torch.testing.assert_close(op.einsum("bti,oi->bto", a, b), torch.einsum("bti,oi->bto", a, b))


def test_equations() -> None:
    assert parse("bti,oi->bto") == ("bti", "oi", "bto")
    assert gradient_equation("bti,oi->bto", 0) == "bto,oi->bti"
    assert gradient_equation("bti,oi->bto", 1) == "bto,bti->oi"
    for wrong in ("bti->bt", "ii,ij->j", "ab,bc->ad", "a.,b->ab", "ab,bc"):
        with pytest.raises(ValueError, match="einsum"):
            parse(wrong)
    with pytest.raises(ValueError, match="does not fit"):
        op.einsum("ab,bc->ac", torch.ones(2, 3), torch.ones(4, 2))


def attention_arguments(**change: Any) -> tuple[Any, ...]:
    form = {"mask": None, "seed": None, "causal": False, "window": 0, "scale": 0.4, "dropout": 0.0, "site": 0}
    return (*{**form, **change}.values(), [], [])


ATTENTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"causal": True, "window": 2},
    "window alone": {"window": 2},
    "bool mask": {"mask": torch.rand(2, 1, 4, 6, generator=torch.Generator().manual_seed(2)) > 0.4},
    "float mask": {"mask": torch.linspace(-2, 2, 24, dtype=torch.float64).view(4, 6), "causal": True},
    "hidden rows": {"mask": torch.tensor([True, False, True, False]).view(4, 1)},
    "dropout": {"causal": True, "dropout": 0.3, "seed": torch.tensor([1, 2]), "site": 4},
}


def plain_attention(q: Tensor, k: Tensor, v: Tensor, form: dict[str, Any]) -> Tensor:
    """The definition, with rows that see nothing giving zeros."""
    t, s = torch.arange(q.shape[2]).unsqueeze(1), torch.arange(k.shape[2])
    seen = (s <= t) if form.get("causal") else torch.ones(len(t), len(s), dtype=torch.bool)
    if form.get("window"):
        seen = seen & (s > t - form["window"])
    scores = q @ k.mT * 0.4
    mask = form.get("mask")
    if mask is not None and mask.dtype == torch.bool:
        seen = seen & mask
    elif mask is not None:
        scores = scores + mask
    empty = ~seen.expand(scores.shape).any(-1, keepdim=True)
    weights = torch.softmax(scores.masked_fill(~seen & ~empty, -math.inf), -1) * ~empty
    if form.get("dropout"):
        weights = op.dropout(weights, form["seed"], form["dropout"], form["site"], [], [])
    return weights @ v


@pytest.mark.parametrize("name", ATTENTIONS)
@pytest.mark.parametrize("width", [3, 5], ids=["fused", "value of another width"])
def test_attention(name: str, width: int) -> None:
    form = ATTENTIONS[name]
    q, k, v = randn(2, 3, 4, 3), randn(2, 3, 6, 3, seed=1), randn(2, 3, 6, width, seed=2)
    rest = attention_arguments(**form)
    out, total = op.attention(q, k, v, *rest)
    want = plain_attention(q, k, v, form)
    torch.testing.assert_close(out, want)
    ours = torch.autograd.grad(out.sin().sum(), (q, k, v))
    for got, expected in zip(ours, torch.autograd.grad(want.sin().sum(), (q, k, v)), strict=True):
        torch.testing.assert_close(got, expected)
    assert total.shape == (2, 3, 4) and not total.requires_grad
    opcheck(op.attention.default, (q, k, v, *rest))


@pytest.mark.parametrize("name", ["causal", "window", "dropout"])
def test_attention_of_a_shard_is_a_slice(name: str) -> None:
    """Heads and queries of a shard see and drop what they would in the whole."""
    form = ATTENTIONS[name]
    q, k, v = (
        randn(2, 4, 6, 3, grad=False),
        randn(2, 4, 6, 3, seed=1, grad=False),
        randn(2, 4, 6, 3, seed=2, grad=False),
    )
    *rest, _, _ = attention_arguments(**form)
    whole, total = op.attention(q, k, v, *rest, [], [])
    grad = randn(2, 4, 6, 3, seed=5, grad=False)
    dq, _, _ = op.attention_backward(grad, q, k, v, *rest[:2], whole, total, *rest[2:], [], [])
    h, t = slice(2, 4), slice(3, 6)
    place = ([2, 4, 6, 6], [0, 2, 3, 0])
    part, part_total = op.attention(q[:, h, t], k[:, h], v[:, h], *rest, *place)
    torch.testing.assert_close(part, whole[:, h, t])
    torch.testing.assert_close(part_total, total[:, h, t])
    part_dq, _, _ = op.attention_backward(
        grad[:, h, t], q[:, h, t], k[:, h], v[:, h], *rest[:2], part, part_total, *rest[2:], *place
    )
    torch.testing.assert_close(part_dq, dq[:, h, t])


def test_attention_of_a_block_that_sees_nothing() -> None:
    q, k, v = randn(1, 1, 3, 4), randn(1, 1, 3, 4, seed=1), randn(1, 1, 3, 4, seed=2)
    out, total = op.attention(q, k, v, None, None, True, 0, 0.5, 0.0, 0, [1, 1, 6, 6], [0, 0, 0, 3])
    assert not out.any() and (total == -math.inf).all()
    assert not any(g.any() for g in torch.autograd.grad(out.sum(), (q, k, v)))


def test_attention_in_half_precision() -> None:
    q, k, v = (randn(1, 2, 5, 8, seed=i, grad=False).bfloat16() for i in range(3))
    out, total = op.attention(q, k, v, *attention_arguments(causal=True))
    assert out.dtype == torch.bfloat16 and total.dtype == torch.float32
    want = F.scaled_dot_product_attention(q.double(), k.double(), v.double(), is_causal=True, scale=0.4)
    torch.testing.assert_close(out.double(), want, rtol=0.03, atol=0.03)


SEED = torch.tensor([7, 11])


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_dropout_statistics(p: float) -> None:
    x = torch.ones(400, 500)
    out = op.dropout(x, SEED, p, 3, [], [])
    kept = out != 0
    torch.testing.assert_close(out[kept], torch.full_like(out[kept], 1 / (1 - p)))
    deviation = math.sqrt(p * (1 - p) / x.numel())
    assert abs(kept.double().mean().item() - (1 - p)) < 4 * deviation
    for dim in (0, 1):
        spread = kept.double().mean(dim).var().item()
        assert spread == pytest.approx(p * (1 - p) / x.shape[dim], rel=0.35), "rows or columns are not independent"
    for other in (
        kept.roll(1, 0),
        kept.roll(1, 1),
        op.dropout(x, SEED, p, 4, [], []) != 0,
        op.dropout(x, SEED + torch.tensor([0, 1]), p, 3, [], []) != 0,
        op.dropout(x, SEED + torch.tensor([1, 0]), p, 3, [], []) != 0,
    ):
        both = torch.corrcoef(torch.stack([kept.double().flatten(), other.double().flatten()]))[0, 1].item()
        assert abs(both) < 5 / math.sqrt(x.numel())


def test_dropout_is_the_same_for_every_cut() -> None:
    x = randn(6, 4, 5, grad=False)
    whole = op.dropout(x, SEED, 0.4, 1, [], [])
    for at in range(6):
        part = op.dropout(x[at : at + 1], SEED, 0.4, 1, [6, 4, 5], [at, 0, 0])
        assert torch.equal(part, whole[at : at + 1])
    assert torch.equal(op.dropout(x[2:5, 1:3], SEED, 0.4, 1, [6, 4, 5], [2, 1, 0]), whole[2:5, 1:3])
    assert torch.equal(op.dropout(x[..., 3:], SEED, 0.4, 1, [6, 4, 5], [0, 0, 3]), whole[..., 3:])


def test_dropout_within_a_dim_of_several_pieces() -> None:
    """A dim that is (h c) of which c is cut: the shard says where it lies along both."""
    x = randn(3, 8, grad=False)
    whole = op.dropout(x, SEED, 0.4, 1, [], []).view(3, 4, 2)
    part = op.dropout(x.view(3, 4, 2)[..., 1].contiguous(), SEED, 0.4, 1, [3, 4, 2], [0, 0, 1, 3, 4, 1])
    assert torch.equal(part, whole[..., 1])


def test_dropout_hash_is_fixed() -> None:
    """Checkpoints are resumed by later versions: the mask must never change."""
    kept = op.dropout(torch.ones(40), torch.tensor([1, 2]), 0.5, 3, [], []) != 0
    assert "".join(str(int(k)) for k in kept) == expected_bits(1, 2, 3, 40)


def expected_bits(seed: int, step: int, site: int, count: int) -> str:
    """The documented hash in Python's integers."""
    top, golden = 1 << 64, 0x9E3779B97F4A7C15

    def mix(x: int) -> int:
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % top
        x = (x ^ (x >> 27)) * 0x94D049BB133111EB % top
        return x ^ (x >> 31)

    base = 0
    for part in (seed, step, site):
        base = mix((base + part + golden) % top)
    return "".join(str(int(mix((base + golden * (i + 1)) % top) >> 11 >= 1 << 52)) for i in range(count))


def test_dropout_gradient() -> None:
    x = randn(4, 5)
    assert torch.autograd.gradcheck(lambda y: op.dropout(y, SEED, 0.3, 1, [], []), (x,))
    opcheck(op.dropout.default, (x, SEED, 0.3, 1, [4, 10], [0, 5]))
    assert not op.dropout(x, SEED, 1.0, 1, [], []).any()


@pytest.mark.parametrize("padding", [-1, 3])
def test_embedding(padding: int) -> None:
    weight, index = randn(6, 4), torch.tensor([[0, 3, 5], [3, 3, 1]])
    out = op.embedding(weight, index, 0, padding)
    want = F.embedding(index, weight, padding_idx=None if padding < 0 else padding)
    torch.testing.assert_close(out, want)
    (got,) = torch.autograd.grad(out.sin().sum(), weight)
    (expected,) = torch.autograd.grad(want.sin().sum(), weight)
    torch.testing.assert_close(got, expected)
    shards = [op.embedding(weight[a:b], index, a, padding) for a, b in ((0, 2), (2, 5), (5, 6))]
    torch.testing.assert_close(sum(shards), out)
    grad = randn(2, 3, 4, seed=3, grad=False)
    whole = op.embedding_backward(grad, index, 6, 0, padding)
    torch.testing.assert_close(op.embedding_backward(grad, index, 3, 2, padding), whole[2:5])
    opcheck(op.embedding.default, (weight, index, 0, padding))


def test_cross_entropy() -> None:
    logits, target = randn(3, 2, 5), torch.tensor([[0, 4], [2, 2], [1, 3]])
    loss, total = op.cross_entropy(logits, target)
    want = F.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="none").view(3, 2)
    torch.testing.assert_close(loss, want)
    (got,) = torch.autograd.grad(loss.sin().sum(), logits)
    (expected,) = torch.autograd.grad(want.sin().sum(), logits)
    torch.testing.assert_close(got, expected)
    torch.testing.assert_close(op.logsumexp(logits) - op.pick(logits, target, 0), want)
    opcheck(op.cross_entropy.default, (logits, target))
    # a cut vocabulary: picks add up, logsumexps combine, gradients are slices
    parts = [(0, 2), (2, 5)]
    torch.testing.assert_close(sum(op.pick(logits[..., a:b], target, a) for a, b in parts), op.pick(logits, target, 0))
    torch.testing.assert_close(
        torch.logsumexp(torch.stack([op.logsumexp(logits[..., a:b]) for a, b in parts]), 0), total
    )
    grad = randn(3, 2, seed=4, grad=False)
    whole = op.cross_entropy_backward(grad, logits, target, total, 0)
    torch.testing.assert_close(op.cross_entropy_backward(grad, logits[..., 2:], target, total, 2), whole[..., 2:])


def test_cross_entropy_in_half_precision_is_fp32() -> None:
    logits = randn(4, 50, grad=False).bfloat16()
    target = torch.arange(4)
    loss, total = op.cross_entropy(logits, target)
    assert loss.dtype == total.dtype == torch.float32
    torch.testing.assert_close(loss, F.cross_entropy(logits.float(), target, reduction="none"))


def test_padding_of_a_cut_vocabulary_changes_nothing() -> None:
    logits, target = randn(4, 5, grad=False), torch.arange(4)
    padded = torch.cat([logits, torch.full((4, 2), -math.inf, dtype=torch.float64)], -1)
    torch.testing.assert_close(op.logsumexp(padded), op.logsumexp(logits))
    grad = op.cross_entropy_backward(torch.ones(4, dtype=torch.float64), padded, target, op.logsumexp(logits), 0)
    assert not grad[:, 5:].any()


def test_total() -> None:
    assert op.total([torch.tensor(1.0), torch.tensor(2.0, dtype=torch.bfloat16)]) == 3.0
    assert op.total([torch.tensor(1.0, dtype=torch.float64)]).dtype == torch.float64
    opcheck(op.total.default, ([torch.tensor(1.0), torch.tensor(2.0)],))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_meta_tensors_give_the_shapes_of_real_ones(dtype: torch.dtype) -> None:
    q, k = torch.ones(2, 3, 4, 8, dtype=dtype), torch.ones(2, 3, 6, 8, dtype=dtype)
    index = torch.zeros(2, 3, dtype=torch.int64)
    cases: list[tuple[Any, tuple[Any, ...]]] = [
        (op.einsum, ("bhtc,bhsc->bhts", q, k)),
        (op.attention, (q, k, k, *attention_arguments(causal=True))),
        (op.dropout, (q, SEED, 0.5, 0, [], [])),
        (op.embedding, (torch.ones(5, 4, dtype=dtype), index, 0, -1)),
        (op.cross_entropy, (torch.ones(2, 3, 5, dtype=dtype), index)),
        (op.logsumexp, (q,)),
        (op.pick, (torch.ones(2, 3, 5, dtype=dtype), index, 0)),
    ]
    for function, arguments in cases:
        real = function(*arguments)
        meta = function(*(a.to("meta") if isinstance(a, Tensor) else a for a in arguments))
        pairs = zip(real, meta, strict=True) if isinstance(real, tuple) else [(real, meta)]
        for a, b in pairs:
            assert (a.shape, a.dtype, a.stride()) == (b.shape, b.dtype, b.stride()), function
