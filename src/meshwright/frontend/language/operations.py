"""The few functions that the generated modules call beyond torch's own: ordinary torch, open to any tracer."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def rms_norm(x: Tensor, dims: int, weight: Tensor | None, eps: float) -> Tensor:
    """``x`` over the root of the mean square of its last ``dims`` dims, times ``weight``."""
    mean_square = x.pow(2).mean(tuple(range(-dims, 0)), keepdim=True)
    normed = x * torch.rsqrt(mean_square + eps)
    return normed if weight is None else weight * normed


def rope(x: Tensor, theta: float) -> Tensor:
    """Rotary position embedding of ``x[... t c]``; channel ``i`` turns together with ``i + c/2``.

    Su et al., RoFormer, 2021, in the layout of the published Llama weights. Angles are float32 at least.
    """
    time, channels = x.shape[-2], x.shape[-1]
    exponents = torch.arange(0, channels, 2, device=x.device).float() / channels
    frequencies = 1.0 / (theta**exponents)
    positions = torch.arange(time, device=x.device).float()
    angles = positions.unsqueeze(1) * frequencies.unsqueeze(0)
    angles = torch.cat((angles, angles), dim=-1)
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    first, second = x[..., : channels // 2], x[..., channels // 2 :]
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    causal: bool,
    window: int = 0,
    scale: float | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """Attention of ``query[b h t c]`` to ``key[b g s c], value[b g s e]``; ``g`` divides ``h``.

    With ``window`` a position sees the last ``window`` ones, itself included.
    """
    mask = None
    if window:
        rows = torch.arange(query.shape[-2], device=query.device).unsqueeze(1)
        columns = torch.arange(key.shape[-2], device=query.device).unsqueeze(0)
        mask = (columns <= rows) & (columns > rows - window)
    return F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        dropout_p=dropout,
        is_causal=causal and mask is None,
        scale=scale,
        enable_gqa=query.shape[1] != key.shape[1],
    )


def following(tokens: Tensor) -> Tensor:
    """``tokens[... t]`` one step on: the last position gets -100, which losses leave out."""
    return F.pad(tokens[..., 1:], (0, 1), value=-100)
