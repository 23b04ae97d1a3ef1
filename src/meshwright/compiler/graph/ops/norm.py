"""``rms_norm``: root mean square normalisation as one op, which keeps for backward its input and one number a row.

``x [rows... shape...]``, ``weight [shape...]``; result like ``x``, and the reciprocal of the root ``[rows... 1...]`` in
the dtype of accumulation. Written out in primitive ops, two wide copies of the input would be kept.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from meshwright.compiler.graph.ops.library import differentiate, register
from meshwright.compiler.graph.ops.loss import wide

_fused = torch.ops.aten._fused_rms_norm
_fused_backward = torch.ops.aten._fused_rms_norm_backward


def _dims(x: Tensor, shape: list[int]) -> list[int]:
    return list(range(x.dim() - len(shape), x.dim()))


def _rms_norm(x: Tensor, shape: list[int], weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    if x.is_cuda and x.dtype == weight.dtype:
        made, root = _fused(x, shape, weight, eps)
        return made.contiguous(), root.to(wide(x.dtype))
    values = x.to(wide(x.dtype))
    root = torch.rsqrt((values * values).mean(_dims(x, shape), keepdim=True) + eps)
    return (values * root * weight).to(x.dtype).contiguous(), root


def _rms_norm_fake(x: Tensor, shape: list[int], weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    rows = [*x.shape[: x.dim() - len(shape)], *[1] * len(shape)]
    return torch.empty_like(x, memory_format=torch.contiguous_format), x.new_empty(rows, dtype=wide(x.dtype))


def _rms_norm_backward(
    grad: Tensor, x: Tensor, shape: list[int], root: Tensor, weight: Tensor
) -> tuple[Tensor, Tensor]:
    if x.is_cuda and x.dtype == weight.dtype == grad.dtype:
        dx, dweight = _fused_backward(grad.contiguous(), x.contiguous(), shape, root, weight, [True, True])
        return dx.contiguous(), dweight.contiguous()
    dims = _dims(x, shape)
    wanted = grad.to(root.dtype)
    normal = x.to(root.dtype) * root
    dweight = (wanted * normal).sum(list(range(x.dim() - len(shape))))
    wanted = wanted * weight
    dx = (wanted - normal * (wanted * normal).mean(dims, keepdim=True)) * root
    return dx.to(x.dtype).contiguous(), dweight.to(weight.dtype).contiguous()


def _rms_norm_backward_fake(
    grad: Tensor, x: Tensor, shape: list[int], root: Tensor, weight: Tensor
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x, memory_format=torch.contiguous_format), weight.new_empty(weight.shape)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, shape, weight, _ = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(x, weight, output[1])
    ctx.shape = list(shape)


def _backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor, None, Tensor, None]:
    x, weight, root = ctx.saved_tensors
    dx, dweight = torch.ops.meshwright.rms_norm_backward(grad, x, ctx.shape, root, weight)
    return dx, None, dweight, None


register(
    "rms_norm(Tensor x, SymInt[] shape, Tensor weight, float eps) -> (Tensor y, Tensor root)", _rms_norm, _rms_norm_fake
)
register(
    "rms_norm_backward(Tensor grad, Tensor x, SymInt[] shape, Tensor root, Tensor weight) -> (Tensor, Tensor)",
    _rms_norm_backward,
    _rms_norm_backward_fake,
)
differentiate("rms_norm", _backward, _setup)
