"""One of two, element by element, by a condition."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from meshwright.compiler.causality.call import Call
from meshwright.compiler.causality.masks import lowness
from meshwright.compiler.causality.registry import rule
from meshwright.compiler.causality.shadow import CHOICE, LOW, MAYBE_GONE, MAYBE_LOW, VERY_LOW, Shadow


@rule("aten.where.self", "aten.where.ScalarOther", "aten.where.ScalarSelf", "aten.where.Scalar")
def where(call: Call) -> Shadow:
    """A known condition takes one branch."""
    return chosen(call, call["condition"], call["self"], call["other"])


@rule("aten.masked_fill")
def masked_fill(call: Call) -> Shadow:
    """``where(mask, value, self)``."""
    return chosen(call, call["mask"], call["value"], call["self"])


def chosen(call: Call, condition: Tensor, yes: Any, no: Any) -> Shadow:
    """Element by element one of two, by a condition."""
    shape = tuple(call.out.shape)
    values = [v if isinstance(v, Tensor) else torch.tensor(v) for v in (condition, yes, no)]
    shadows = [call.shadow(v).expand(shape) for v in (condition, yes, no)]
    shadows, item = call.interpreter.listings.joined(shadows, [v.expand(shape) for v in values], shape)
    c, a, b = shadows
    takes = values[0].expand(shape)
    known = torch.where(c.known, torch.where(takes, a.known, b.known), c.known & a.known & b.known)
    deps = None
    if any(s.deps is not None for s in shadows):
        words = [call.words(s) for s in shadows]
        one = torch.where(takes.unsqueeze(-1), words[1], words[2]) | words[0]
        either = words[0] | words[1] | words[2]
        half = call.width // 2
        either[..., half:] = words[1][..., half:] & words[2][..., half:]  # by way of a choice, but for what both have
        deps = torch.where(c.known.unsqueeze(-1), one, either)
    trait = _chosen_trait(values, shadows, takes, call.out)
    return Shadow(known, deps, item, None, trait)


def _chosen_trait(values: list[Tensor], shadows: list[Shadow], takes: Tensor, out: Tensor) -> Tensor | None:
    c, a, b = shadows
    if not out.is_floating_point() and bool(c.known.all()):
        return None
    traits = []
    for value, shadow in ((values[1], a), (values[2], b)):
        own = torch.zeros((), dtype=torch.uint8) if shadow.trait is None else shadow.trait
        if out.is_floating_point():
            own = own | torch.where(shadow.known, lowness(value, out.dtype), 0).to(torch.uint8)
            gone = shadow.known & torch.isneginf(value.to(torch.float64))
            own = own | torch.where(gone, MAYBE_GONE, 0).to(torch.uint8)
        traits.append(own)
    both = traits[0] | traits[1]
    maybe = torch.where(both & (LOW | VERY_LOW | MAYBE_LOW) != 0, MAYBE_LOW, 0) | (both & MAYBE_GONE) | CHOICE
    plain = torch.where(takes, traits[0], traits[1]) & ~MAYBE_GONE
    trait = torch.where(c.known, plain, maybe).to(torch.uint8).expand(out.shape)
    return trait if bool(trait.any()) else None
