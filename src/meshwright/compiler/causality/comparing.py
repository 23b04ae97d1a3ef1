"""Two runs side by side: how far apart, and where they must not be."""

from __future__ import annotations

import torch
from torch import Tensor

from meshwright.compiler.causality.edits import Edit
from meshwright.compiler.causality.feed import Feed
from meshwright.compiler.causality.typed import distinct


def distances(a: Tensor, b: Tensor) -> Tensor | None:
    """``[rows, positions]``: the largest difference of features, relative to the largest element.

    What is no number in both runs is equal; None where it is in one alone, or where values grow without bound.
    """
    finite_a, finite_b = torch.isfinite(a), torch.isfinite(b)
    if bool((finite_a != finite_b).any()):
        return None
    far = torch.where(finite_a, (a - b).abs(), 0.0)
    size = float(torch.where(finite_a, a.abs(), 0.0).max()) if a.numel() else 0.0
    if size > 1e100:
        return None
    return (
        far.amax(-1) / size
        if size and a.shape[-1]
        else torch.zeros(a.shape[:2], dtype=torch.float64) + (far.amax(-1) if a.shape[-1] else 0.0)
    )


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
