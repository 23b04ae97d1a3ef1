"""Attention keeps its structure; a mask that is causal by position becomes a flag."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from meshwright.frontend.capture.lowering.contraction import matmul
from meshwright.frontend.capture.lowering.site import Folded, Site, lowers

aten = torch.ops.aten


@lowers(aten.scaled_dot_product_attention.default)
def attention(
    site: Site,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    scale = 1.0 / math.sqrt(query.shape[-1]) if scale is None else scale
    shape = query.shape[:-2]
    folded = Folded(causal=is_causal)
    if attn_mask is not None:
        folded = site.folded.get(site.node, folded)
        if site.node in site.folded:
            attn_mask = site.constants[folded.constant] if folded.constant else None
    if enable_gqa:
        key, value = _repeat(key, query.shape[-3]), _repeat(value, query.shape[-3])
    query, key, value = (_four(x) for x in (query, key, value))
    batch = torch.broadcast_shapes(query.shape[:2], key.shape[:2], value.shape[:2])  # type: ignore[no-untyped-call]  # torch has no types here
    query, key, value = (x if x.shape[:2] == batch else x.expand(*batch, *x.shape[2:]) for x in (query, key, value))
    if attn_mask is not None:
        attn_mask = _four_mask(attn_mask, len(shape))
    if attn_mask is not None and attn_mask.requires_grad:
        return _maths(site, query, key, value, attn_mask, dropout_p, scale).reshape(*shape, *query.shape[2:3], -1)
    drops = dropout_p > 0
    out, _ = torch.ops.meshwright.attention(
        query,
        key,
        value,
        attn_mask,
        site.key if drops else None,
        folded.causal,
        folded.window,
        float(scale),
        float(dropout_p),
        site.next_site() if drops else 0,
        [],
        [],
    )
    made: Tensor = out
    return made if len(shape) == 2 else made.reshape(*shape, *made.shape[2:])


def _four(x: Tensor) -> Tensor:
    """``[b h t c]``; further dims in front are one with the batch."""
    if x.dim() < 4:
        return x.view(*[1] * (4 - x.dim()), *x.shape) if x.dim() == 2 else x.unsqueeze(1)
    return x if x.dim() == 4 else x.reshape(-1, *x.shape[-3:])


def _four_mask(mask: Tensor, leading: int) -> Tensor:
    """A mask of attention with ``leading`` dims before ``t c``, in the dims of :func:`_four`."""
    if leading == 1 and mask.dim() == 3:
        return mask.unsqueeze(1)
    if leading > 2 and mask.dim() > 4:
        return mask.reshape(-1, *mask.shape[-3:])
    return mask


def _repeat(x: Tensor, heads: int) -> Tensor:
    """Each head of keys or values once for every query head that shares it."""
    own = x.shape[-3]
    if own == heads:
        return x
    wide = x.unsqueeze(-3).expand(*x.shape[:-2], heads // own, *x.shape[-2:])
    return wide.reshape(*x.shape[:-3], heads, *x.shape[-2:])


def _maths(site: Site, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, dropout: float, scale: float) -> Tensor:
    """Attention in primitive ops, for a mask that is learned."""
    scores = matmul(site, query, key.transpose(-1, -2)) * scale + mask
    weights = torch.softmax(scores, -1)
    if dropout > 0:
        weights = torch.ops.meshwright.dropout(weights, site.key, float(dropout), site.next_site(), [], [])
    made: Tensor = matmul(site, weights, value)
    return made
