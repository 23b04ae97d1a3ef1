"""Cross entropy as a sum of losses over a count of valid targets, never an average of averages."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from meshwright.compiler.graph.ops.loss import wide
from meshwright.frontend.capture.lowering.losses import MEAN, NONE, SUM, reduced
from meshwright.frontend.capture.lowering.site import Site, lowers

aten = torch.ops.aten


def _classes_last(x: Tensor) -> Tensor:
    return x.movedim(1, -1) if x.dim() > 2 else x


def _over_count(losses: Tensor, weights: Tensor, reduction: int) -> Tensor:
    """The losses, their sum, or their sum over the sum of weights (a count: at least 1)."""
    if reduction == NONE:
        return losses
    total = losses.sum()
    if reduction == SUM:
        return total
    if weights.dtype == torch.bool:
        return total / weights.sum().clamp(min=1).to(total.dtype)
    return total / weights.sum().to(total.dtype)


def _weighted(losses: Tensor, safe: Tensor, valid: Tensor, weight: Tensor | None) -> tuple[Tensor, Tensor]:
    """The losses of valid targets, weighted by class, and what their mean divides by."""
    if weight is None:
        return losses.masked_fill(~valid, 0.0), valid
    weights = weight.to(losses.dtype)[safe].masked_fill(~valid, 0.0)
    return losses * weights, weights


def from_logits(logits: Tensor, target: Tensor, weight: Tensor | None, reduction: int, ignored: int) -> Tensor:
    """``logits [... v]``, ``target [...]`` of classes."""
    valid = target != ignored
    safe = target.masked_fill(~valid, 0)
    losses, _ = torch.ops.meshwright.cross_entropy(logits, safe)
    losses, weights = _weighted(losses, safe, valid, weight)
    return _over_count(losses, weights, reduction)


@lowers(aten.cross_entropy_loss.default)
def cross_entropy_loss(
    site: Site,
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    reduction: int = MEAN,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> Tensor:
    logits = _classes_last(logits)
    if target.is_floating_point():
        return _with_probabilities(logits, _classes_last(target), weight, reduction, label_smoothing)
    if not label_smoothing:
        return from_logits(logits, target, weight, reduction, ignore_index)
    valid = target != ignore_index
    safe = target.masked_fill(~valid, 0)
    losses, _ = torch.ops.meshwright.cross_entropy(logits, safe)
    picked, weights = _weighted(losses, safe, valid, weight)
    # the smoothed part: the mean over classes of (weighted) -log p
    logs = torch.log_softmax(logits.to(wide(logits.dtype)), -1)
    spread = -(logs if weight is None else logs * weight).sum(-1).masked_fill(~valid, 0.0)
    classes = logits.shape[-1]
    mixed = (1 - label_smoothing) * picked + (label_smoothing / classes) * spread
    return _over_count(mixed, weights, reduction)


def _with_probabilities(
    logits: Tensor, target: Tensor, weight: Tensor | None, reduction: int, smoothing: float
) -> Tensor:
    if smoothing:
        target = target * (1 - smoothing) + smoothing / logits.shape[-1]
    logs = torch.log_softmax(logits.to(wide(logits.dtype)), -1)
    losses = -(logs * target if weight is None else logs * target * weight).sum(-1)
    return reduced(losses, reduction)


@lowers(aten.nll_loss_nd.default, aten.nll_loss.default, aten.nll_loss2d.default)
def nll_loss(
    site: Site,
    x: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    reduction: int = MEAN,
    ignore_index: int = -100,
) -> Tensor:
    if (logits := _logits(site)) is not None:
        return from_logits(_classes_last(logits), target, weight, reduction, ignore_index)
    valid = target != ignore_index
    safe = target.masked_fill(~valid, 0)
    losses = -_classes_last(x).gather(-1, safe.unsqueeze(-1)).squeeze(-1)
    losses, weights = _weighted(losses, safe, valid, weight)
    return _over_count(losses, weights, reduction)


def _logits(site: Site) -> Tensor | None:
    """What the loss's log_softmax over the classes is taken of, if its input is one."""
    source: Any = site.node.args[0]
    if source.target is aten.log_softmax.int:
        dtype = source.args[2] if len(source.args) > 2 else source.kwargs.get("dtype")
    elif source.target is aten._log_softmax.default:
        dtype = None
    else:
        return None
    x: Tensor = site.values[source.args[0]]
    over_classes = source.args[1] % x.dim() == (1 if x.dim() > 1 else 0)
    return x if over_classes and dtype is None else None
