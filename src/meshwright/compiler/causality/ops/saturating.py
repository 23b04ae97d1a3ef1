"""Functions that make zero of a masking number, or keep a zero."""

from __future__ import annotations

from dataclasses import replace

import torch

from meshwright.compiler.causality.call import Call
from meshwright.compiler.causality.masks import assume_low
from meshwright.compiler.causality.registry import rule
from meshwright.compiler.causality.shadow import CHOICE, LOW, MAYBE_GONE, MAYBE_LOW, VERY_LOW, Shadow, nothing


@rule("aten.exp", "aten.exp2", "aten.sigmoid")
def exponential(call: Call) -> Shadow:
    """Of a masking number: zero, for every input."""
    shadow = call.shadow(call["self"])
    maybe = shadow.has(MAYBE_LOW | MAYBE_GONE)
    trait = None if nothing(maybe) else torch.where(maybe, CHOICE, 0).to(torch.uint8)
    low = shadow.has(LOW | VERY_LOW) & ~shadow.known & (call.out == 0)
    if not bool(low.any()):
        return replace(shadow, rank=None, trait=trait)
    if bool(shadow.has(LOW).any()):
        assume_low(call)
    deps = None if shadow.deps is None else torch.where(low.unsqueeze(-1), 0, shadow.deps)
    return Shadow(shadow.known | low, deps, shadow.item, None, trait)


@rule("aten.nan_to_num", "aten.neg", "aten.abs", "aten.relu", "aten.sqrt")
def of_zero_zero(call: Call) -> Shadow:
    """What is zero by choice stays so."""
    shadow = call.shadow(call["self"])
    chosen = shadow.has(CHOICE)
    trait = None if nothing(chosen) else torch.where(chosen, CHOICE, 0).to(torch.uint8)
    return replace(shadow, rank=None, trait=trait)
