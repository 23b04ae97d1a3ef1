"""What values are, told whatever the length: indices of positions, and masks made by comparing them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from meshwright.compiler.causality.second.carrying import Carrier
from meshwright.compiler.causality.second.composing import LOW
from meshwright.compiler.causality.second.seen import Band, Seen

Line = tuple[Mapping[int, int], float]
Run = Callable[[Sequence[float]], float | None]
"""Computes an op on constants."""
_COMPARED = {"lt": (-math.inf, -1), "le": (-math.inf, 0), "gt": (1, math.inf), "ge": (0, math.inf)}
_PRODUCTS = ("mul", "logical_and", "bitwise_and", "__and__")
_SUMS = ("add", "sub")
_EITHER = ("logical_or", "bitwise_or", "__or__")


def triangle(low: bool, diagonal: int, operand: Seen, result: Seen) -> Band | None:
    """``tril`` and ``triu``: the mask of the last two dims."""
    query, key = result.parts()[-2:]
    if len(query) != 1 or len(key) != 1:
        return None
    first, last = (-math.inf, float(diagonal)) if low else (float(diagonal), math.inf)
    return Band(query[0], key[0], first, last, operand.constant, 0.0)


def compared(base: str, left: Line | None, right: Line | None) -> Band | None:
    """A comparison of indices: true within an interval of their difference."""
    if base not in _COMPARED or left is None or right is None:
        return None
    times = dict(left[0])
    for part, count in right[0].items():
        times[part] = times.get(part, 0) - count
    times = {part: count for part, count in times.items() if count}
    if sorted(times.values()) != [-1, 1]:
        return None
    constant = left[1] - right[1]
    if not float(constant).is_integer():
        return None
    key = next(p for p, n in times.items() if n == 1)
    query = next(p for p, n in times.items() if n == -1)
    low, high = _COMPARED[base]  # of: key - query + constant
    return Band(query, key, math.ceil(low - constant) if low > -math.inf else low, _below(high, constant), 1.0, 0.0)


def _below(high: float, constant: float) -> float:
    return math.floor(high - constant) if high < math.inf else high


def line_of(base: str, lines: Sequence[Line | None]) -> Line | None:
    """Sums and differences of indices."""
    if any(line is None for line in lines):
        return None
    known = [line for line in lines if line is not None]
    if base in _KEEPS:
        return known[0] if len(known) == 1 else None
    signs = {"add": (1, 1), "sub": (1, -1), "rsub": (-1, 1), "neg": (-1,)}.get(base)
    if signs is None or len(signs) != len(known):
        return None
    times: dict[int, int] = {}
    for (own, _), sign in zip(known, signs, strict=True):
        for part, count in own.items():
            times[part] = times.get(part, 0) + sign * count
    constant = sum(sign * line[1] for line, sign in zip(known, signs, strict=True))
    return {part: count for part, count in times.items() if count}, constant


_KEEPS = ("_to_copy", "clone", "lift_fresh_copy", "alias", "detach", "copy", "contiguous")


def masked(base: str, run: Run, operands: Sequence[Any]) -> Band | None:
    """The mask that a pointwise op leaves. ``operands``: of each a :class:`Band`, a constant, or None for what is
    unknown; ``run`` computes the op on constants."""
    bands = [one for one in operands if isinstance(one, Band)]
    if not bands:
        return None
    aligned = [b if (b.query, b.key) == (bands[0].query, bands[0].key) else b.turned() for b in bands]
    if any((b.query, b.key) != (bands[0].query, bands[0].key) for b in aligned):
        return None
    if len({(b.low, b.high) for b in aligned}) > 1:
        absorbing = _absorbing(base)
        filled = [b.filled(absorbing) for b in aligned] if absorbing is not None else [None]
        known = [b for b in filled if b is not None]
        if len(known) != len(bands) or len(bands) != len(operands):
            return None
        low, high = max(b.low for b in known), min(b.high for b in known)
        inside = _value(base, run, [b.inside for b in known])
        return Band(known[0].query, known[0].key, low, high, inside, known[0].outside)
    first, rest = aligned[0], iter(aligned)
    each = [next(rest) if isinstance(one, Band) else one for one in operands]
    inside = _value(base, run, [one.inside if isinstance(one, Band) else one for one in each])
    outside = _value(base, run, [one.outside if isinstance(one, Band) else one for one in each])
    return replace(first, inside=inside, outside=outside).valued(lambda value: value)


def _absorbing(base: str) -> Callable[[float], bool] | None:
    if base in _PRODUCTS:
        return lambda value: value == 0
    if base == "add":
        return lambda value: value <= LOW
    return (lambda value: value == 1) if base in _EITHER else None


def _value(base: str, run: Run, values: Sequence[float | None]) -> float | None:
    """Of elements with these values, None for one that is not known."""
    if base == "where":
        return None if values[0] is None else values[1 if values[0] else 2]
    if base == "masked_fill":
        return None if values[1] is None else values[2 if values[1] else 0]
    absorbing = _absorbing(base)
    if absorbing is not None:
        deciding = next((v for v in values if v is not None and absorbing(v)), None)
        if deciding is not None:
            return deciding
    if base == "sub" and values[0] is not None and values[0] <= LOW and None in values:
        return values[0]
    known = [v for v in values if v is not None]
    return run(known) if len(known) == len(values) else None


def evaluate(func: Any, arguments: Mapping[str, Any], names: Sequence[str]) -> Run:
    """Computes an op on constants in place of the arguments of some names."""

    def run(values: Sequence[float]) -> float | None:
        given = dict(arguments)
        for name, value in zip(names, values, strict=True):
            old = given[name]
            given[name] = torch.tensor(value, dtype=old.dtype) if isinstance(old, Tensor) else value
        made = func(*[given[a.name] for a in func._schema.arguments if not a.kwarg_only],
                    **{a.name: given[a.name] for a in func._schema.arguments if a.kwarg_only})  # fmt: skip
        value = float(made)
        return None if math.isnan(value) else value

    return run


def operand_values(
    carrier: Carrier, numbers: Mapping[str, int], arguments: Mapping[str, Any], names: Sequence[str]
) -> list[Any]:
    """Of each argument of a pointwise op its mask, its constant, or None. ``numbers``: which operand a tensor is."""
    found: list[Any] = []
    for name in names:
        value = arguments[name]
        if isinstance(value, Tensor):
            at = numbers[name]
            constant = carrier.operands[at].constant
            found.append(constant if constant is not None else carrier.band(at))
        else:
            found.append(float(value) if isinstance(value, bool | int | float) else None)
    return found
