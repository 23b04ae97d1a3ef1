"""Losses with a ``reduction``: computed per element, then summed and multiplied by a constant."""

from __future__ import annotations

import torch
from torch import Tensor

from meshwright.frontend.capture.lowering.mean import HALF
from meshwright.frontend.capture.lowering.site import Site, lowers

aten = torch.ops.aten
NONE, MEAN, SUM = 0, 1, 2


def reduced(x: Tensor, reduction: int) -> Tensor:
    """The loss of all elements; half precision is summed in fp32."""
    if reduction == NONE:
        return x
    total = (x.float() if x.dtype in HALF else x).sum()
    return total * (1.0 / x.numel()) if reduction == MEAN else total


@lowers(aten.mse_loss.default)
def mse_loss(site: Site, x: Tensor, target: Tensor, reduction: int = MEAN) -> Tensor:
    away = x - target
    return reduced(away * away, reduction)


@lowers(aten.l1_loss.default)
def l1_loss(site: Site, x: Tensor, target: Tensor, reduction: int = MEAN) -> Tensor:
    return reduced((x - target).abs(), reduction)


@lowers(aten.huber_loss.default)
def huber_loss(site: Site, x: Tensor, target: Tensor, reduction: int = MEAN, delta: float = 1.0) -> Tensor:
    away = (x - target).abs()
    return reduced(torch.where(away < delta, 0.5 * away * away, delta * (away - 0.5 * delta)), reduction)


@lowers(aten.smooth_l1_loss.default)
def smooth_l1_loss(site: Site, x: Tensor, target: Tensor, reduction: int = MEAN, beta: float = 1.0) -> Tensor:
    away = (x - target).abs()
    if beta == 0:
        return reduced(away, reduction)
    return reduced(torch.where(away < beta, 0.5 / beta * away * away, away - 0.5 * beta), reduction)


@lowers(aten.binary_cross_entropy.default)
def binary_cross_entropy(
    site: Site, x: Tensor, target: Tensor, weight: Tensor | None = None, reduction: int = MEAN
) -> Tensor:
    # torch bounds the logarithms at -100, so that 0 * log(0) is 0
    found = -(target * x.log().clamp(min=-100.0) + (1 - target) * (-x).log1p().clamp(min=-100.0))
    return reduced(found if weight is None else found * weight, reduction)


@lowers(aten.binary_cross_entropy_with_logits.default)
def binary_cross_entropy_with_logits(
    site: Site,
    x: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    pos_weight: Tensor | None = None,
    reduction: int = MEAN,
) -> Tensor:
    log = torch.nn.functional.softplus(-x)  # -log(sigmoid(x))
    found = (1 - target) * x + (log if pos_weight is None else (1 + (pos_weight - 1) * target) * log)
    return reduced(found if weight is None else found * weight, reduction)


@lowers(aten.kl_div.default)
def kl_div(site: Site, x: Tensor, target: Tensor, reduction: int = MEAN, *, log_target: bool = False) -> Tensor:
    if log_target:
        return reduced(target.exp() * (target - x), reduction)
    return reduced(torch.special.xlogy(target, target) - target * x, reduction)
