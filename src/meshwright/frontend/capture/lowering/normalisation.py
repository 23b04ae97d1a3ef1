"""Normalisations that reduce over the batch, or that torch fuses on some devices only, in primitive ops."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from meshwright.frontend.capture.lowering.mean import HALF, mean_of
from meshwright.frontend.capture.lowering.site import Site, lowers

aten = torch.ops.aten


@lowers(aten.rms_norm.default)
def rms_norm(site: Site, x: Tensor, shape: list[int], weight: Tensor | None = None, eps: float | None = None) -> Tensor:
    wide = x.float() if x.dtype in HALF else x
    dims = list(range(x.dim() - len(shape), x.dim()))
    small = torch.finfo(x.dtype).eps if eps is None else eps
    if weight is not None and weight.is_floating_point() and weight.shape == x.shape[dims[0] :]:
        return torch.ops.meshwright.rms_norm(x, shape, weight, small)[0]  # type: ignore[no-any-return]  # ops have no types
    made = wide * torch.rsqrt(mean_of(wide * wide, dims, True) + small)
    made = made if weight is None else made * weight
    return made.to(x.dtype)


def _by_channel(x: Tensor, like: Tensor) -> Tensor:
    return x.view(1, -1, *[1] * (like.dim() - 2))


def _normalised(
    x: Tensor, middle: Tensor, spread: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> Tensor:
    made = (x - _by_channel(middle, x)) * _by_channel(torch.rsqrt(spread + eps), x)
    made = made if weight is None else made * _by_channel(weight, x)
    return made if bias is None else made + _by_channel(bias, x)


@lowers(aten._native_batch_norm_legit_functional.default)
def batch_norm_training(
    site: Site,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor,
    running_var: Tensor,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[Any, ...]:
    """Training statistics are sums over the whole batch times a constant."""
    wide = x.float() if x.dtype in HALF else x
    if not training:
        made = _normalised(wide, running_mean, running_var, weight, bias, eps).to(x.dtype)
        return made, None, None, running_mean, running_var
    over = [0, *range(2, x.dim())]
    count = x.numel() // x.shape[1]
    middle = mean_of(wide, over)
    away = wide - _by_channel(middle, x)
    squares = (away * away).sum(over)
    spread = squares * (1.0 / count)
    made = _normalised(wide, middle, spread, weight, bias, eps).to(x.dtype)
    with torch.no_grad():
        kept_mean = running_mean * (1 - momentum) + middle.to(running_mean.dtype) * momentum
        unbiased = squares * (1.0 / max(count - 1, 1))
        kept_var = running_var * (1 - momentum) + unbiased.to(running_var.dtype) * momentum
    return made, None, None, kept_mean, kept_var


@lowers(aten.batch_norm.default)
def batch_norm(
    site: Site,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool = False,
) -> Tensor:
    """Without running statistics, or with frozen ones."""
    wide = x.float() if x.dtype in HALF else x
    if not training and running_mean is not None and running_var is not None:
        return _normalised(wide, running_mean, running_var, weight, bias, eps).to(x.dtype)
    over = [0, *range(2, x.dim())]
    middle = mean_of(wide, over)
    away = wide - _by_channel(middle, x)
    return _normalised(wide, middle, mean_of(away * away, over), weight, bias, eps).to(x.dtype)


@lowers(aten._native_batch_norm_legit.no_stats)
def batch_norm_without_statistics(
    site: Site, x: Tensor, weight: Tensor | None, bias: Tensor | None, training: bool, momentum: float, eps: float
) -> tuple[Any, ...]:
    return batch_norm(site, x, weight, bias, None, None, True, momentum, eps), None, None


@lowers(aten._native_batch_norm_legit_no_training.default)
def batch_norm_frozen(
    site: Site,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor,
    running_var: Tensor,
    momentum: float,
    eps: float,
) -> tuple[Any, ...]:
    """What torch calls a layer in evaluation beside others that train."""
    return batch_norm(site, x, weight, bias, running_mean, running_var, False, momentum, eps), None, None


@lowers(aten.group_norm.default)
def group_norm(
    site: Site,
    x: Tensor,
    groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enabled: bool = True,
) -> Tensor:
    wide = x.float() if x.dtype in HALF else x
    parts = wide.reshape(x.shape[0], groups, x.shape[1] // groups, *x.shape[2:])
    over = list(range(2, parts.dim()))
    away = parts - mean_of(parts, over, True)
    made = (away * torch.rsqrt(mean_of(away * away, over, True) + eps)).reshape(x.shape)
    made = made if weight is None else made * _by_channel(weight, x)
    made = made if bias is None else made + _by_channel(bias, x)
    return made.to(x.dtype)


@lowers(aten._weight_norm.default)
def weight_norm(site: Site, v: Tensor, g: Tensor, dim: int = 0) -> Tensor:
    return _weight_and_norm(v, g, dim)[0]


@lowers(aten._weight_norm_interface.default)
def weight_norm_interface(site: Site, v: Tensor, g: Tensor, dim: int = 0) -> tuple[Tensor, Tensor]:
    return _weight_and_norm(v, g, dim)


def _weight_and_norm(v: Tensor, g: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """``v`` scaled to the norms ``g``, which are taken over all dims but ``dim`` (-1: over all)."""
    others = [d for d in range(v.dim()) if dim == -1 or d != dim % v.dim()]
    norm = (v * v).sum(others, keepdim=True).sqrt()
    return v * (g / norm), norm
