"""Numbers that mask: how low is low."""

from __future__ import annotations

import torch
from torch import Tensor

from meshwright.compiler.causality.call import Call
from meshwright.compiler.causality.places import user_place
from meshwright.compiler.causality.shadow import LOW, MAYBE_GONE, MAYBE_LOW, VERY_LOW

MASKS = LOW | VERY_LOW | MAYBE_LOW | MAYBE_GONE
"""Traits of masking numbers, which a sum keeps."""

LOW_BOUND = -1e3
"""``exp`` of it is zero in every dtype, if scores stay above it by a hundred or so."""

_VERY_LOW_BOUND = -1e30


def lowness(values: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """uint8 traits of finite masking numbers; infinities have none, for they decide by themselves."""
    if not values.is_floating_point():
        values = values.to(torch.float64)
    kind = dtype if dtype is not None and dtype.is_floating_point else values.dtype
    bound = max(_VERY_LOW_BOUND, torch.finfo(kind).min / 2)
    finite = torch.isfinite(values)
    very, low = finite & (values <= bound), finite & (values <= LOW_BOUND)
    return torch.where(very, VERY_LOW, torch.where(low, LOW, 0)).to(torch.uint8)


def assume_low(call: Call) -> None:
    """Note that a finite number is taken to mask."""
    sentence = "scores stay far above the finite number that masks them"
    call.interpreter.notes.assumptions.setdefault(sentence, user_place())
