"""Divisions and products by a number that is no power of two, which round what they average."""

from __future__ import annotations

import math
from typing import Any

from torch import fx

from meshwright.compiler.graph.adapter import OpOverload, overload_name
from meshwright.compiler.numerics.casts import half, through_views

_SCALES = ("aten.div.Tensor", "aten.div.Scalar", "aten.mul.Tensor", "aten.mul.Scalar")
_LOCAL = ("aten.sum.default", "aten.sum.dim_IntList")


def factor(node: fx.Node) -> float | None:
    """By what a node in half precision divides (or, inverted, multiplies); None if it does not, or by a power of 2."""
    if not isinstance(node.target, OpOverload) or not half(node) or overload_name(node.target) not in _SCALES:
        return None
    number: Any = node.args[1]
    if not isinstance(number, (int, float)) or not number or not math.isfinite(number):
        return None
    by = abs(float(number))
    if math.frexp(by)[0] == 0.5:
        return None
    return by if "div" in overload_name(node.target) else 1 / by


def local_sum(node: fx.Node) -> fx.Node | None:
    """The sum that an average is taken of, in half precision, where nothing else reads it."""
    source: Any = node.args[0]
    if not isinstance(source, fx.Node):
        return None
    source = through_views(source)
    plain = isinstance(source.target, OpOverload) and overload_name(source.target) in _LOCAL
    return source if plain and half(source) and len(source.users) == 1 else None
