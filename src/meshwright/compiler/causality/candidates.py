"""Masks that choose rows: of one that is computed, every row that it could choose is taken.

How many rows there are then depends on nothing, and each row is that of one candidate, at a place that is known.
Whether the candidate is there is a dependency of its own, by way of a choice.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from meshwright.compiler.causality.call import Call
from meshwright.compiler.causality.shadow import Shadow, constant
from meshwright.compiler.causality.words import any_over, softened


def chosen_rows(call: Call, mask: Tensor) -> tuple[Tensor, Shadow]:
    """``nonzero(mask)`` ``[rows, dims]`` with its shadow."""
    shadow = call.settled(mask)
    truth = mask != 0
    if bool(shadow.known.all()) and shadow.deps is None:
        rows = truth.nonzero()
        return rows, constant(rows.shape)
    call.interpreter.notes.chosen = True
    words = call.words(shadow)
    if not call.interpreter.all_candidates:
        rows = truth.nonzero()
        union = softened(any_over(words.reshape(-1, call.width), (0,)))
        return rows, Shadow(constant(rows.shape, False).known, union.expand(*rows.shape, call.width))
    rows = (truth | ~shadow.known).nonzero()
    presence = softened(words[tuple(rows.unbind(1))] if mask.dim() else words.expand(rows.shape[0], -1))
    deps = presence.unsqueeze(1).expand(*rows.shape, call.width).contiguous()
    return rows, Shadow(constant(rows.shape).known, deps)


def expand_masks(
    call: Call, given: list[Tensor | None], value: Tensor
) -> tuple[list[Tensor | None], list[Shadow | None]] | None:
    """Integer indices, one for each dim up to the last that is indexed, and their shadows."""
    indices: list[Tensor | None] = []
    shadows: list[Shadow | None] = []
    for one in given:
        if one is None:
            indices.append(None)
            shadows.append(None)
        elif one.dtype in (torch.bool, torch.uint8):
            rows, shadow = chosen_rows(call, one)
            for dim in range(one.dim()):
                indices.append(rows[:, dim])
                shadows.append(shadow.map(lambda x, d=dim: x[:, d]))
        else:
            size = value.shape[len(indices)]
            places = one.long()
            indices.append(torch.where(places < 0, places + size, places))
            shadows.append(call.shadow(one))
    return indices, shadows


def count_of(shape: torch.Size) -> int:
    """Elements of a shape."""
    return math.prod(shape)
