"""First values of parameters: a function of the seed and the parameter's name alone, so the same on every mesh."""

from __future__ import annotations

import hashlib
import math

import torch
from torch import Tensor

from meshwright.compiler.diagnostics import error, suggestion
from meshwright.frontend.language import tree
from meshwright.frontend.language.block import Initial
from meshwright.frontend.language.sizes import Dimensions, number

_ARGUMENTS = {
    "normal": (1, 1),
    "truncated_normal": (1, 1),
    "uniform": (1, 2),
    "zeros": (0, 0),
    "ones": (0, 0),
    "constant": (1, 1),
}


def initial(expression: tree.Expression, dimensions: Dimensions) -> Initial:
    """What stands after ``~``: ``normal(std)``, ``truncated_normal(std)``, ``uniform(bound)``, ``uniform(low, high)``,
    ``constant(value)``, ``zeros``, ``ones``."""
    match expression:
        case tree.Name(name, span):
            arguments: tuple[tree.Argument, ...] = ()
        case tree.Call(tree.Word(name, span), arguments, _):
            pass
        case _:
            raise error(
                "E0222",
                "this says no way to fill a parameter",
                expression.span,
                "write one such as 'normal(0.02)' or 'zeros'",
            )
    if name not in _ARGUMENTS:
        raise error("E0222", f"unknown way '{name}' to fill a parameter", span, suggestion(name, _ARGUMENTS))
    least, most = _ARGUMENTS[name]
    if not least <= len(arguments) <= most:
        counts = str(least) if least == most else f"{least} or {most}"
        raise error(
            "E0211", f"'{name}' takes {counts} numbers, not {len(arguments)}", expression.span, "write that many"
        )
    values = tuple(float(number(a.value, dimensions.constants)) for a in arguments)
    if name in ("normal", "truncated_normal") and values[0] < 0:
        raise error("E0222", f"the deviation of '{name}' is {values[0]:g}", expression.span, "make it zero or more")
    if name == "uniform":
        values = (-abs(values[0]), abs(values[0])) if len(values) == 1 else values
    if name in ("zeros", "ones"):
        return Initial("constant", (0.0 if name == "zeros" else 1.0,))
    return Initial(name, values)


def seed_of(name: str, seed: int) -> int:
    """The seed of one parameter's generator."""
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def draw(how: Initial, name: str, shape: tuple[int, ...], seed: int) -> Tensor:
    """The whole first value of the parameter ``name``, float32 on the CPU."""
    if how.kind == "constant":
        return torch.full(shape, how.arguments[0])
    generator = torch.Generator().manual_seed(seed_of(name, seed))
    value = torch.empty(shape)
    if how.kind == "uniform":
        return value.uniform_(*how.arguments, generator=generator)
    if how.kind == "truncated_normal":
        deviation = how.arguments[0]
        uniform = value.uniform_(math.erf(-2 / math.sqrt(2)), math.erf(2 / math.sqrt(2)), generator=generator)
        return uniform.erfinv_().mul_(deviation * math.sqrt(2)).clamp_(-2 * deviation, 2 * deviation)
    return value.normal_(0.0, how.arguments[0], generator=generator)
