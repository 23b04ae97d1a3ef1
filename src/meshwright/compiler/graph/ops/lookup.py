"""``embedding``: rows of a table of which a shard may hold only some.

A row that the shard does not hold is zero, so that the shards' results add up to the whole one.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from meshwright.compiler.graph.ops.library import differentiate, register


def local_index(index: Tensor, start: int, rows: int) -> tuple[Tensor, Tensor | None]:
    """The index into a shard of ``rows`` rows from ``start``, and which indices fall outside
    (None where it is known that none does; asking costs a wait on an accelerator, so only on a CPU)."""
    local = index - start if start else index
    outside = (local < 0) | (local >= rows)
    if index.device.type == "cpu" and not bool(outside.any()):
        return local, None
    return local.masked_fill(outside, 0), outside


def _embedding(weight: Tensor, index: Tensor, start: int, padding_idx: int) -> Tensor:
    local, outside = local_index(index, start, weight.shape[0])
    rows = torch.nn.functional.embedding(local, weight)
    return rows if outside is None else rows.masked_fill_(outside.unsqueeze(-1), 0)


def _embedding_fake(weight: Tensor, index: Tensor, start: int, padding_idx: int) -> Tensor:
    return weight.new_empty([*index.shape, weight.shape[1]])


def _embedding_backward(grad: Tensor, index: Tensor, rows: int, start: int, padding_idx: int) -> Tensor:
    if rows == 0:
        return grad.new_zeros([0, grad.shape[-1]])
    local, outside = local_index(index, start, rows)
    if padding_idx >= 0:
        padded = index == padding_idx
        outside = padded if outside is None else outside | padded
    if outside is not None:
        grad = grad.masked_fill(outside.unsqueeze(-1), 0)
    flat = grad.reshape(-1, grad.shape[-1])
    # many tokens share a row: half precision would lose their sum
    wide = flat.float() if flat.dtype in (torch.bfloat16, torch.float16) else flat
    made: Tensor = torch.ops.aten.embedding_dense_backward(wide, local.reshape(-1), rows, -1, False)
    return made.to(grad.dtype)


def _embedding_backward_fake(grad: Tensor, index: Tensor, rows: int, start: int, padding_idx: int) -> Tensor:
    return grad.new_empty([rows, grad.shape[-1]])


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    weight, index, ctx.start, ctx.padding_idx = inputs
    ctx.rows = weight.shape[0]
    ctx.save_for_backward(index)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    (index,) = ctx.saved_tensors
    return (
        torch.ops.meshwright.embedding_backward(grad, index, ctx.rows, ctx.start, ctx.padding_idx),
        None,
        None,
        None,
    )


register("embedding(Tensor weight, Tensor index, int start, int padding_idx) -> Tensor", _embedding, _embedding_fake)
register(
    "embedding_backward(Tensor grad, Tensor index, int rows, int start, int padding_idx) -> Tensor",
    _embedding_backward,
    _embedding_backward_fake,
)
differentiate("embedding", _backward, _setup)
