"""Products whose rows have weights of their own, such as those of experts, and counts of who chose what.

``grouped_mm`` and ``grouped_outer`` take rows that are sorted by group and where each group ends; ``routed_mm`` and
``routed_outer`` take rows in any order and the number of each row's group, and sort within the kernel. What a row gets
of the latter does not depend on which other rows there are, so they may be cut along their rows.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from meshwright.compiler.diagnostics import error
from meshwright.compiler.graph.ops.library import differentiate, register

_ALIGNED = 16
"""Bytes to which the fused kernel wants its rows aligned."""


def _fused(x: Tensor, weight: Tensor) -> bool:
    """Whether torch's own kernel takes the operands: in bf16, on an accelerator, rows and columns aligned."""
    if not (x.is_cuda and x.dtype == weight.dtype == torch.bfloat16 and x.numel()):
        return False
    return all(n * x.element_size() % _ALIGNED == 0 for n in (*x.shape[1:], *weight.shape[1:]))


def _grouped_mm(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    if _fused(x, weight):
        made: Tensor = torch._grouped_mm(x.contiguous(), weight, ends.to(torch.int32))
        return made
    out = x.new_zeros([x.shape[0], weight.shape[2]])
    start = 0
    for group, end in enumerate(ends.tolist()):
        if end > start:
            torch.mm(x[start:end], weight[group], out=out[start:end])
        start = max(start, end)
    return out


def _grouped_mm_fake(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    return x.new_empty([x.shape[0], weight.shape[2]])


def _grouped_outer(x: Tensor, grad: Tensor, ends: Tensor) -> Tensor:
    out = x.new_zeros([ends.shape[0], x.shape[1], grad.shape[1]])
    start = 0
    for group, end in enumerate(ends.tolist()):
        if end > start:
            torch.mm(x[start:end].t(), grad[start:end], out=out[group])
        start = max(start, end)
    return out


def _grouped_outer_fake(x: Tensor, grad: Tensor, ends: Tensor) -> Tensor:
    return x.new_empty([ends.shape[0], x.shape[1], grad.shape[1]])


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, ends = inputs
    ctx.save_for_backward(x if weight.requires_grad else None, weight if x.requires_grad else None, ends)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, weight, ends = ctx.saved_tensors
    ours = torch.ops.meshwright
    return (
        ours.grouped_mm(grad, weight.transpose(1, 2), ends) if ctx.needs_input_grad[0] else None,
        ours.grouped_outer(x, grad, ends) if ctx.needs_input_grad[1] else None,
        None,
    )


def _sorted(group: Tensor, groups: int) -> tuple[Tensor, Tensor]:
    """The order that sorts rows by group, and where each group ends in it. Rows of no group come last."""
    placed = torch.where((group >= 0) & (group < groups), group, groups)
    order = torch.argsort(placed, stable=True)
    return order, torch.searchsorted(placed[order].contiguous(), torch.arange(groups, device=group.device), right=True)


def _routed_mm(x: Tensor, weight: Tensor, group: Tensor) -> Tensor:
    order, ends = _sorted(group, weight.shape[0])
    out = x.new_zeros([x.shape[0], weight.shape[2]])
    out[order] = _grouped_mm(x[order], weight, ends)
    return out


def _routed_mm_fake(x: Tensor, weight: Tensor, group: Tensor) -> Tensor:
    return x.new_empty([x.shape[0], weight.shape[2]])


def _routed_outer(x: Tensor, grad: Tensor, group: Tensor, groups: int) -> Tensor:
    order, ends = _sorted(group, groups)
    return _grouped_outer(x[order], grad[order], ends)


def _routed_outer_fake(x: Tensor, grad: Tensor, group: Tensor, groups: int) -> Tensor:
    return x.new_empty([groups, x.shape[1], grad.shape[1]])


def _count(x: Tensor, bins: int) -> Tensor:
    made = torch.bincount(x.reshape(-1).clamp(min=-1) + 1, minlength=bins + 1)
    if made.shape[0] > bins + 1:
        message = f"bincount found the number {made.shape[0] - 2}, and there is room for those below {bins}"
        raise error("E0778", message, action="give a minlength that is greater than all numbers that are counted")
    return made[1:].clone()


def _count_fake(x: Tensor, bins: int) -> Tensor:
    return x.new_empty([bins], dtype=torch.int64)


register("grouped_mm(Tensor x, Tensor weight, Tensor ends) -> Tensor", _grouped_mm, _grouped_mm_fake)
register("grouped_outer(Tensor x, Tensor grad, Tensor ends) -> Tensor", _grouped_outer, _grouped_outer_fake)
differentiate("grouped_mm", _backward, _setup)
register("routed_mm(Tensor x, Tensor weight, Tensor group) -> Tensor", _routed_mm, _routed_mm_fake)
register("routed_outer(Tensor x, Tensor grad, Tensor group, int groups) -> Tensor", _routed_outer, _routed_outer_fake)
register("count(Tensor x, int bins) -> Tensor", _count, _count_fake)
