"""What is known of the values that an op makes, beside what they see: lines of indices, masks; and what may mask."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from meshwright.compiler.causality.call import tensors_in
from meshwright.compiler.causality.interpreter import is_view
from meshwright.compiler.causality.second.carrying import Carrier
from meshwright.compiler.causality.second.composing import LOW
from meshwright.compiler.causality.second.knowledge import Knowledge, address
from meshwright.compiler.causality.second.masks import (
    Line,
    compared,
    evaluate,
    line_of,
    masked,
    operand_values,
    triangle,
)
from meshwright.compiler.causality.second.seen import Band, Seen
from meshwright.compiler.rules.rule import Rule

_FILLED = (
    *("ones", "zeros", "full", "scalar_tensor", "new_ones", "new_zeros", "new_full"),
    *("ones_like", "zeros_like", "full_like", "fill", "zero", "lift_fresh_copy"),
)
_CHOOSING = (
    *("eq", "ne", "lt", "le", "gt", "ge", "isin", "where", "sign"),
    *("floor", "round", "sub", "rsub", "topk", "sort"),
)
"""By way of these, less may be depended on than they are given: what they choose among, what cancels out."""
_SOFTMAX = ("_softmax", "_safe_softmax")
_COPYING = ("_to_copy", "clone", "copy")
_LOWEST = -1e3
"""From where on numbers are taken to be meant to mask."""


@dataclass(frozen=True)
class Made:
    """One op, and one of its results, by what it is made of."""

    knowledge: Knowledge
    func: Any
    base: str
    """The op's name, without namespace and overload."""
    bound: Mapping[str, Any]
    rule: Rule
    given: Sequence[Tensor]
    seens: Sequence[Seen]
    out: Tensor
    sees: Seen
    """What the rule says that the result sees."""
    number: int
    """Which result."""

    def seen(self) -> Seen:
        """What is known of the result."""
        band, line = self._values()
        sees = self.sees
        if self.base in _SOFTMAX:
            sees = replace(sees, exact=sees.exact and (self._carrier.band(0) is None or band is not None))
        lost = band is None and any(s.band is not None for s in self.seens)
        if (self._may_mask() or self.base in _CHOOSING or lost) and sees.depends:
            sees = replace(sees, exact=False)
        return replace(sees, band=band, line=line)

    @cached_property
    def _carrier(self) -> Carrier:
        return Carrier(self.rule, self.seens, self.sees, self.number, steady=self.base in _SOFTMAX)

    def _values(self) -> tuple[Band | None, Line | None]:
        base, out, seens, bound, carrier = self.base, self.out, self.seens, self.bound, self._carrier
        if base == "arange" and bound.get("step", 1) == 1 and not out.is_floating_point():
            return None, ({0: 1} if out.numel() > 1 else {}, float(bound.get("start", 0)))
        if base in _FILLED and not any(s.depends for s in seens) and out.numel():
            first = out.flatten()[0]
            return None, ({}, float(first)) if bool((out == first).all()) else None
        if base in ("tril", "triu"):
            return triangle(base == "tril", bound["diagonal"], seens[0], self.sees), None
        if torch.Tag.pointwise in self.func.tags or base in _COPYING:
            return self._pointwise()
        if base in _SOFTMAX:
            return softmaxed(self.knowledge, carrier.band(0)), None
        parts = self.sees.parts()
        if base == "cumsum" and seens[0].constant == 1 and len(parts[bound["dim"]]) == 1:
            return None, ({parts[bound["dim"]][0]: 1}, 1.0)
        if len(self.given) == 1 and (is_view(self.func) or base == "_unsafe_view") and self.given[0].dtype == out.dtype:
            return carrier.band(0), carrier.line(0)
        return None, None

    def _pointwise(self) -> tuple[Band | None, Line | None]:
        base, bound, carrier = self.base, self.bound, self._carrier
        numbers = {k: i for i, k in enumerate(n for n, v in bound.items() for _ in tensors_in(v))}
        names = [n for n, v in bound.items() if isinstance(v, Tensor | bool | int | float) and n not in ("alpha",)]
        if bound.get("alpha", 1) != 1:
            return None, None
        if base in _COPYING:
            source = numbers.get("src", 0)
            return carrier.band(source), carrier.line(source)
        lines = [carrier.line(numbers[n]) if isinstance(bound[n], Tensor) else ({}, float(bound[n])) for n in names]
        if len(names) == 2:
            band = compared(base, lines[0], lines[1])
            if band is not None:
                return band, None
        given = operand_values(carrier, numbers, bound, names)
        low = any(isinstance(v, float) and -math.inf < v <= _LOWEST for v in given)
        sure = any(isinstance(v, Band) and None not in (v.inside, v.outside) for v in given)
        if low and base in ("where", "masked_fill", "mul", "div") and not sure and None in given:
            self.knowledge.others = True
        made = masked(base, evaluate(self.func, bound, names), given)
        if base == "exp" and made is not None and isinstance(given[0], Band):
            made = softmaxed(self.knowledge, given[0]) or made.valued(lambda value: None)
        return made, line_of(base, lines)

    def _may_mask(self) -> bool:
        """Whether an operand may be a mask of which nothing is known."""
        weights = self.knowledge.weights
        return any(
            not s.depends and s.band is None and s.line is None and t.dim() > 1 and address(t) not in weights
            for t, s in zip(self.given, self.seens, strict=True)
        )


def softmaxed(knowledge: Knowledge, band: Band | None) -> Band | None:
    """What is masked is zero, in rows of which something is left."""
    found = band.filled(lambda value: value <= LOW) if band is not None else None
    if found is None or not found.low <= 0 <= found.high:
        return None
    knowledge.finite = knowledge.finite or found.outside != -math.inf
    return replace(found, inside=None, outside=0.0)
