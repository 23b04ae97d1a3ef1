"""``attention``: scaled dot product attention that keeps its structure and its logsumexp.

Query ``[b h t c]``, key ``[b h s c]``, value ``[b h s d]``; result ``[b h t d]`` (stored as
``b t h d``, the order in which models go on) and logsumexp ``[b h t]``. Positions are those of the
whole tensor: ``offsets`` says where a shard's b, h, t and s begin, so a cut sequence needs
no mask. A row that may see nothing gives zeros, has logsumexp -inf and gets no gradient.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from meshwright.compiler.graph.ops.library import differentiate, register
from meshwright.compiler.graph.ops.loss import wide
from meshwright.compiler.graph.ops.random import keep, linear_index

_flash_cpu = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_cpu_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
_flash_cuda = torch.ops.aten._scaled_dot_product_flash_attention
_flash_cuda_backward = torch.ops.aten._scaled_dot_product_flash_attention_backward


@dataclass(frozen=True)
class Form:
    """What an attention does besides the products."""

    mask: Tensor | None
    seed: Tensor | None
    causal: bool
    window: int
    scale: float
    dropout: float
    site: int
    sizes: list[int]
    offsets: list[int]

    @property
    def drops(self) -> bool:
        return self.dropout > 0.0 and self.seed is not None

    def start(self, dim: int) -> int:
        return self.offsets[dim] if self.offsets else 0

    def kept(self, scores: Tensor) -> Tensor:
        """The weights' dropout mask, scaled; ``scores`` gives shape and dtype."""
        assert self.seed is not None
        index = linear_index(scores.shape, self.sizes, self.offsets, scores.device)
        return keep(self.seed, self.site, index, self.dropout).to(scores.dtype).mul_(1.0 / (1.0 - self.dropout))

    def aligned(self) -> bool:
        """Whether visibility is the plain triangle of the local positions."""
        return self.causal and not self.window and self.mask is None and self.start(2) == self.start(3)

    def visible(self, t: int, s: int, device: torch.device) -> Tensor | None:
        """Which of the local ``s`` each local ``t`` may see by position; None: all."""
        first, last = self.start(2), self.start(2) + t - 1
        if self.causal and self.start(3) + s - 1 > first:
            causal = True
        else:
            causal = False  # every key lies before the first query
        windowed = bool(self.window) and self.start(3) <= last - self.window
        if not causal and not windowed:
            return None
        query = torch.arange(first, first + t, device=device).unsqueeze(1)
        key = torch.arange(self.start(3), self.start(3) + s, device=device)
        seen = torch.ones(t, s, dtype=torch.bool, device=device)
        if causal:
            seen &= key <= query
        if windowed:
            seen &= key > query - self.window
        return seen

    def bias(self, t: int, s: int, dtype: torch.dtype, device: torch.device) -> Tensor | None:
        """All visibility as one additive mask in ``dtype``, broadcastable to ``[b h t s]``; None: all is seen."""
        seen = self.visible(t, s, device)
        mask = self.mask
        if mask is not None and mask.dtype == torch.bool:
            seen = mask if seen is None else seen & mask
            mask = None
        if seen is None:
            return None if mask is None else mask.to(dtype)
        if mask is not None:
            return mask.to(dtype).masked_fill(~seen, float("-inf"))
        return torch.zeros(seen.shape, dtype=dtype, device=device).masked_fill_(~seen, float("-inf"))


def _four(bias: Tensor, t: int, s: int) -> Tensor:
    """The mask as the fused kernel wants it: four dims, the last two whole."""
    bias = bias.reshape((1,) * (4 - bias.dim()) + tuple(bias.shape))
    return bias.expand(bias.shape[0], bias.shape[1], t, s)


def _unit(x: Tensor) -> Tensor:
    """The fused kernels walk the last dim with stride 1."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _fused_cpu(query: Tensor, key: Tensor, value: Tensor, form: Form) -> bool:
    return (
        query.device.type == "cpu"
        and not form.drops
        and query.shape[-1] == value.shape[-1]
        and min(*query.shape, key.shape[2]) > 0
    )


def _fused_cuda(query: Tensor, value: Tensor, form: Form) -> bool:
    return (
        query.device.type == "cuda"
        and query.dtype in (torch.float16, torch.bfloat16)
        and not form.drops
        and query.shape[-1] == value.shape[-1]
        and query.shape[-1] % 8 == 0
        and query.shape[-1] <= 256
    )


def _stored_by_token(x: Tensor) -> Tensor:
    """``[b h t d]`` laid out as ``b t h d``."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def _attention(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    form = Form(*rest)
    t, s = query.shape[2], key.shape[2]
    if _fused_cuda(query, value, form) and (form.aligned() or _no_bias(query, key, form)):
        out, total, *_ = _flash_cuda(query, key, value, 0.0, form.aligned(), scale=form.scale)
        return _stored_by_token(out), total[..., :t].contiguous()
    if _fused_cpu(query, key, value, form):
        bias = None if form.aligned() else form.bias(t, s, query.dtype, query.device)
        bias = None if bias is None else _four(bias, t, s)
        out, total = _flash_cpu(
            _unit(query), _unit(key), _unit(value), 0.0, form.aligned(), attn_mask=bias, scale=form.scale
        )
        if bias is not None:
            total = total.masked_fill((bias == float("-inf")).all(-1), float("-inf"))
        return _stored_by_token(out), total.contiguous()
    return _plain(query, key, value, form)


def plain_attention(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    """The op in its maths form, whatever kernels there are: products, a mask, a softmax."""
    return _plain(query, key, value, Form(*rest))


def _plain(query: Tensor, key: Tensor, value: Tensor, form: Form) -> tuple[Tensor, Tensor]:
    scores = _scores(query, key, form)
    total = torch.logsumexp(scores, -1)
    weights = _weights(scores, total)
    if form.drops:
        weights = weights * form.kept(weights)
    out = torch.matmul(weights.to(value.dtype), value)
    return _stored_by_token(out), total


def _no_bias(query: Tensor, key: Tensor, form: Form) -> bool:
    return form.mask is None and form.visible(query.shape[2], key.shape[2], query.device) is None


def _scores(query: Tensor, key: Tensor, form: Form) -> Tensor:
    scores = torch.matmul(query, key.transpose(-1, -2)).to(wide(query.dtype)) * form.scale
    bias = form.bias(query.shape[2], key.shape[2], scores.dtype, query.device)
    return scores if bias is None else scores + bias


def _weights(scores: Tensor, total: Tensor) -> Tensor:
    # a row that sees nothing: -inf minus -inf would be NaN
    shift = total.masked_fill(total == float("-inf"), 0.0)
    return torch.exp(scores - shift.unsqueeze(-1))


def _attention_fake(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    b, h, t, _ = query.shape
    out = query.new_empty([b, t, h, value.shape[3]]).transpose(1, 2)
    return out, query.new_empty([b, h, t], dtype=wide(query.dtype))


def _attention_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    seed: Tensor | None,
    out: Tensor,
    logsumexp: Tensor,
    *rest: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    form = Form(mask, seed, *rest)
    t, s = query.shape[2], key.shape[2]
    total = logsumexp.masked_fill(logsumexp == float("-inf"), 0.0)
    made: tuple[Tensor, ...]
    if _fused_cuda(query, value, form) and (form.aligned() or _no_bias(query, key, form)):
        zero = torch.zeros((), dtype=torch.int64, device=query.device)
        made = _flash_cuda_backward(
            grad, query, key, value, out, logsumexp, None, None, t, s, 0.0, form.aligned(), zero, zero, scale=form.scale
        )
    elif _fused_cpu(query, key, value, form):
        bias = None if form.aligned() else form.bias(t, s, query.dtype, query.device)
        made = _flash_cpu_backward(
            _unit(grad),
            _unit(query),
            _unit(key),
            _unit(value),
            _unit(out),
            total,
            0.0,
            form.aligned(),
            attn_mask=None if bias is None else _four(bias, t, s),
            scale=form.scale,
        )
    else:
        return plain_attention_backward(grad, query, key, value, mask, seed, out, logsumexp, *rest)
    return _stored_by_token(made[0]), _stored_by_token(made[1]), _stored_by_token(made[2])


def plain_attention_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    seed: Tensor | None,
    out: Tensor,
    logsumexp: Tensor,
    *rest: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients in their maths form, whatever kernels there are."""
    total = logsumexp.masked_fill(logsumexp == float("-inf"), 0.0)
    made = _plain_backward(grad, query, key, value, out, total, Form(mask, seed, *rest))
    return _stored_by_token(made[0]), _stored_by_token(made[1]), _stored_by_token(made[2])


def _plain_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, total: Tensor, form: Form
) -> tuple[Tensor, Tensor, Tensor]:
    weights = _weights(_scores(query, key, form), total)
    by_weights = torch.matmul(grad, value.transpose(-1, -2)).to(weights.dtype)
    dropped = weights
    if form.drops:
        kept = form.kept(weights)
        dropped, by_weights = weights * kept, by_weights * kept
    inner = (grad.to(weights.dtype) * out.to(weights.dtype)).sum(-1, keepdim=True)
    by_scores = (weights * (by_weights - inner) * form.scale).to(query.dtype)
    return (
        torch.matmul(by_scores, key),
        torch.matmul(by_scores.transpose(-1, -2), query),
        torch.matmul(dropped.to(grad.dtype).transpose(-1, -2), grad),
    )


def _attention_backward_fake(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    def like(x: Tensor) -> Tensor:
        b, h, t, c = x.shape
        return x.new_empty([b, t, h, c]).transpose(1, 2)

    return like(query), like(key), like(value)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, key, value, mask, seed, *ctx.rest = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(query, key, value, mask, seed, *output)


def _backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    query, key, value, mask, seed, out, total = ctx.saved_tensors
    made = torch.ops.meshwright.attention_backward(grad, query, key, value, mask, seed, out, total, *ctx.rest)
    return (*made, *[None] * 9)


_FORM = "bool causal, int window, float scale, float dropout, int site, int[] sizes, int[] offsets"
register(
    f"attention(Tensor query, Tensor key, Tensor value, Tensor? mask, Tensor? seed, {_FORM}) "
    "-> (Tensor out, Tensor logsumexp)",
    _attention,
    _attention_fake,
)
register(
    "attention_backward(Tensor grad, Tensor query, Tensor key, Tensor value, Tensor? mask, Tensor? seed, Tensor out, "
    f"Tensor logsumexp, {_FORM}) -> (Tensor, Tensor, Tensor)",
    _attention_backward,
    _attention_backward_fake,
)
differentiate("attention", _backward, _setup)
