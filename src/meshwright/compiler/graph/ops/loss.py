"""Cross entropy and its pieces, in which a shard may hold only some classes.

Logits are ``[... v]``, targets int64 ``[...]`` of whole indices. Losses and logsumexp of half
precision logits are fp32. ``start`` is the first class that the shard holds.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from meshwright.compiler.graph.ops.library import differentiate, register
from meshwright.compiler.graph.ops.lookup import local_index


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which values of ``dtype`` are accumulated."""
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


def _logsumexp(x: Tensor) -> Tensor:
    return torch.logsumexp(x.to(wide(x.dtype)), -1)


def _logsumexp_fake(x: Tensor) -> Tensor:
    return x.new_empty(x.shape[:-1], dtype=wide(x.dtype))


def _pick(x: Tensor, index: Tensor, start: int) -> Tensor:
    local, outside = local_index(index, start, x.shape[-1])
    found = x.gather(-1, local.unsqueeze(-1)).squeeze(-1)
    return found.contiguous() if outside is None else found.masked_fill(outside, 0)


def _pick_fake(x: Tensor, index: Tensor, start: int) -> Tensor:
    return x.new_empty(index.shape)


def _cross_entropy(logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    total = _logsumexp(logits)
    return total - _pick(logits, target, 0), total


def _cross_entropy_fake(logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    return _logsumexp_fake(logits), _logsumexp_fake(logits)


def _cross_entropy_backward(grad: Tensor, logits: Tensor, target: Tensor, logsumexp: Tensor, start: int) -> Tensor:
    local, outside = local_index(target, start, logits.shape[-1])
    made = (logits.to(logsumexp.dtype) - logsumexp.unsqueeze(-1)).exp_()
    hit = torch.full_like(logsumexp, -1.0)
    if outside is not None:
        hit.masked_fill_(outside, 0.0)
    made.scatter_add_(-1, local.unsqueeze(-1), hit.unsqueeze(-1))
    return made.mul_(grad.unsqueeze(-1)).to(logits.dtype).contiguous()


def _cross_entropy_backward_fake(grad: Tensor, logits: Tensor, target: Tensor, logsumexp: Tensor, start: int) -> Tensor:
    return torch.empty_like(logits, memory_format=torch.contiguous_format)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    logits, target = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(logits, target, output[1])


def _backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor, None]:
    logits, target, logsumexp = ctx.saved_tensors
    return torch.ops.meshwright.cross_entropy_backward(grad, logits, target, logsumexp, 0), None


register("logsumexp(Tensor x) -> Tensor", _logsumexp, _logsumexp_fake)
register("pick(Tensor x, Tensor index, int start) -> Tensor", _pick, _pick_fake)
register(
    "cross_entropy(Tensor logits, Tensor target) -> (Tensor loss, Tensor logsumexp)",
    _cross_entropy,
    _cross_entropy_fake,
)
register(
    "cross_entropy_backward(Tensor grad, Tensor logits, Tensor target, Tensor logsumexp, int start) -> Tensor",
    _cross_entropy_backward,
    _cross_entropy_backward_fake,
)
differentiate("cross_entropy", _backward, _setup)
