"""Functions of single elements: all axes are kept, several operands are aligned by name."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from meshwright.compiler.diagnostics import Span, error
from meshwright.frontend.language.functions.invocation import Invocation, builtin
from meshwright.frontend.language.term import Term, align, widest

FUNCTIONAL = (
    "relu", "relu6", "elu", "selu", "celu", "gelu", "silu", "mish", "softplus", "softsign", "sigmoid", "tanh",
    "hardswish", "hardsigmoid", "hardtanh", "leaky_relu", "logsigmoid", "softshrink", "hardshrink", "tanhshrink",
)  # fmt: skip
"""Names taken from torch.nn.functional; their keyword arguments are passed on."""

TORCH = (
    "exp",
    "log",
    "sqrt",
    "rsqrt",
    "abs",
    "sin",
    "cos",
    "square",
    "erf",
    "sign",
    "log1p",
    "expm1",
    "maximum",
    "minimum",
)
"""Names taken from torch."""


OPERANDS = {"maximum": 2, "minimum": 2}
"""How many tensors a function takes, where it is not one."""

KEYWORDS: dict[str, tuple[str, ...]] = {
    "gelu": ("approximate",),
    "leaky_relu": ("negative_slope",),
    "elu": ("alpha",),
    "celu": ("alpha",),
    "softplus": ("beta", "threshold"),
    "hardtanh": ("min_val", "max_val"),
    "softshrink": ("lambd",),
    "hardshrink": ("lambd",),
}
"""The keyword arguments that are passed on."""


def pointwise_names() -> tuple[str, ...]:
    return FUNCTIONAL + TORCH


def pointwise(name: str, terms: list[Term], keywords: dict[str, object], span: Span) -> Term:
    """``name`` applied element by element; one operand must have every axis of the others."""
    wide = widest(terms)
    if wide is None:
        raise error(
            "E0207",
            f"no operand of '{name}' has every axis of the others: {' and '.join(t.named() for t in terms)}",
            span,
            "give one of them the missing axes first",
        )
    codes = [align(term, wide.axes) for term in terms] + [f"{key}={value!r}" for key, value in keywords.items()]
    where = "F" if name in FUNCTIONAL else "torch"
    return Term(wide.axes, f"{where}.{name}({', '.join(codes)})", span, weight=all(t.weight for t in terms))


def refusal(name: str, operands: int, keywords: dict[str, object]) -> str | None:
    """What torch has against these arguments, found by trying them on a single number."""
    function = getattr(F if name in FUNCTIONAL else torch, name)
    try:
        function(*[torch.zeros(1)] * operands, **keywords)
    except (TypeError, ValueError, RuntimeError) as fault:
        return str(fault).splitlines()[0]
    return None


@builtin("swiglu", 2)
def swiglu(call: Invocation) -> Term:
    """``swiglu(gate, up)``: ``silu(gate) * up``."""
    gate, up = call.tensor(0), call.tensor(1)
    if set(gate.axes) != set(up.axes):
        raise error(
            "E0207", f"'swiglu' needs two tensors of the same axes, not {gate.named()} and {up.named()}", call.span,
            "give both the same axes",
        )  # fmt: skip
    return Term(gate.axes, f"(F.silu({gate.code}) * {align(up, gate.axes)})", call.span)


@builtin("dropout", 2)
def dropout(call: Invocation) -> Term:
    """``dropout(x, 0.1)``: in training each element is zero with that probability, the rest scaled up."""
    term, rate = call.tensor(0), call.term(1)
    value = rate.constant
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1:
        raise error(
            "E0211", "the second argument of 'dropout' is a probability", rate.span, "write a number from 0 up to 1"
        )
    return Term(term.axes, f"F.dropout({term.code}, {float(value)!r}, self.training)", call.span)
