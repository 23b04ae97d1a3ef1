"""Two runs side by side: how far apart, and where they must not be."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from meshwright.compiler.causality.edits import Edit
from meshwright.compiler.causality.feed import Feed
from meshwright.compiler.causality.typed import distinct


@dataclass(frozen=True)
class Apart:
    """How far two outputs are apart. ``far`` and ``tried`` are ``[rows, positions]``."""

    far: Tensor
    """The largest difference of features that are numbers, relative to the largest element of both outputs."""
    tried: Tensor
    """Where some feature is a number in both: what is none says nothing, neither of a leak nor of there being none."""
    features: Tensor
    """Which features are numbers in both anywhere."""


def distances(a: Tensor, b: Tensor) -> Apart:
    """Compare two outputs ``[rows, positions, features]`` of one shape.

    Infinities of opposite sign are as far apart as the largest element is large; other numbers that are not finite
    compare with nothing. Where values grow beyond 1e100 nothing is tried.
    """
    finite = torch.isfinite(a) & torch.isfinite(b)
    size = float(torch.where(finite, torch.maximum(a.abs(), b.abs()), 0.0).max()) if a.numel() else 0.0
    if size > 1e100 or not a.shape[-1]:
        finite = torch.zeros_like(finite)
    far = torch.where(finite, (a - b).abs() / (size or 1.0), 0.0)
    far = torch.where(torch.isinf(a) & (a == -b), 1.0, far)
    features = finite.flatten(0, 1).any(0)
    if not a.shape[-1]:
        return Apart(far.new_zeros(a.shape[:2]), finite.any(-1), features)
    return Apart(far.amax(-1), finite.any(-1), features)


def protected(feed: Feed, edit: Edit, positions: int, offset: int) -> dict[str, Tensor]:
    """By kind of leak: the outputs ``[rows, positions]`` that must not see the changed tokens."""
    time_of = torch.arange(positions) - offset
    inside = (time_of >= 0) & (time_of < feed.length)
    mine = torch.zeros(feed.rows, dtype=torch.bool)
    mine[edit.row] = True
    first = min(edit.positions)
    made = {
        "future": mine[:, None] & ((time_of < first) & inside)[None],
        "batch": (~mine)[:, None] & torch.ones(positions, dtype=torch.bool)[None],
    }
    if feed.segments is not None:
        own = feed.segments[edit.row]
        changed = distinct(own[list(edit.positions)])
        other = ~torch.isin(own[time_of.clamp(0, feed.length - 1)], changed) & inside
        made["document"] = mine[:, None] & other[None]
    return made


def first_far(worst: Tensor) -> tuple[int, int]:
    """The first row and position where a difference is a third of the largest: one of many that are alike."""
    row, time = (worst >= 0.34 * worst.max()).nonzero()[0].tolist()
    return row, time
