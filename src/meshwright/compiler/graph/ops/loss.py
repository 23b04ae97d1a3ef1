"""Cross entropy and its pieces, in which a shard may hold only some classes.

Logits are ``[... v]``, targets int64 ``[...]`` of whole indices. Losses and logsumexp of half
precision logits are fp32. ``start`` is the first class that the shard holds. What is as large as the logits is made
piece by piece.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from meshwright.compiler.graph.ops.library import differentiate, register
from meshwright.compiler.graph.ops.lookup import local_index
from meshwright.compiler.graph.ops.pieces import pieces


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which values of ``dtype`` are accumulated."""
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


def _logsumexp(x: Tensor) -> Tensor:
    rows = x.reshape(-1, x.shape[-1])
    made = x.new_empty(rows.shape[0], dtype=wide(x.dtype))
    for start, end in pieces(*rows.shape):
        made[start:end] = torch.logsumexp(rows[start:end].to(made.dtype), -1)
    return made.view(x.shape[:-1])


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
    made = torch.empty_like(logits, memory_format=torch.contiguous_format)
    rows, results = logits.reshape(-1, logits.shape[-1]), made.view(-1, logits.shape[-1])
    grads, targets, totals = grad.reshape(-1), target.reshape(-1), logsumexp.reshape(-1)
    for first, end in pieces(*rows.shape):
        local, outside = local_index(targets[first:end], start, logits.shape[-1])
        total = totals[first:end]
        piece = (rows[first:end].to(total.dtype) - total.unsqueeze(-1)).exp_()
        hit = torch.full_like(total, -1.0)
        if outside is not None:
            hit.masked_fill_(outside, 0.0)
        piece.scatter_add_(-1, local.unsqueeze(-1), hit.unsqueeze(-1))
        results[first:end] = piece.mul_(grads[first:end].unsqueeze(-1))
    return made


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
