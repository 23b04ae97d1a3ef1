"""Contractions: the equation is the rule. A factor that the result lacks is summed."""

from __future__ import annotations

import math
from typing import Any

from meshwright.compiler.rules.dims import listed
from meshwright.compiler.rules.rule import OpCall, Rule, einsum, rule

_EACH = (frozenset({0}), frozenset({1}))


def contraction(call: OpCall, text: str, **more: Any) -> Rule:
    """An einsum over the call's operands; factors absent from the result are summed."""
    made = einsum(text, call.operands)
    result = listed(made.results[0] or ())
    summed = frozenset(made.sizes) - result
    whole = more.pop("whole", frozenset())
    return Rule(
        made.sizes,
        made.operands,
        made.results,
        reduce=dict.fromkeys(sorted(summed - whole), "sum"),
        whole=whole,
        linear=more.pop("linear", _EACH),
        relations=dict.fromkeys(sorted(summed), "all"),
        flops=2.0 * math.prod(made.sizes.values()),
        accumulates=summed,
        **more,
    )


@rule("meshwright.einsum")
def einsum_(call: OpCall) -> Rule:
    left, _, result = str(call.args[0]).replace(" ", "").partition("->")
    first, _, second = left.partition(",")
    return contraction(call, f"{' '.join(first)}, {' '.join(second)} -> {' '.join(result)}")


@rule("aten.mm")
def mm(call: OpCall) -> Rule:
    return contraction(call, "m k, k n -> m n")


@rule("aten.bmm")
def bmm(call: OpCall) -> Rule:
    return contraction(call, "b m k, b k n -> b m n")


@rule("aten.mv")
def mv(call: OpCall) -> Rule:
    return contraction(call, "m k, k -> m")


@rule("aten.dot", "aten.vdot")
def dot(call: OpCall) -> Rule:
    return contraction(call, "k, k ->")


@rule("aten.addmm", "aten.baddbmm", "aten.addmv")
def addmm(call: OpCall) -> Rule:
    """The bias is added once, so the summed factor is not cut."""
    product = {"addmm": "m k, k n -> m n", "baddbmm": "b m k, b k n -> b m n", "addmv": "m k, k -> m"}
    operands, _, result = product[call.name.split(".")[1]].partition(" -> ")
    names = result.split()
    shape = call.operands[0].shape
    aligned = names[len(names) - len(shape) :]
    bias = " ".join("1" if size == 1 else name for name, size in zip(aligned, shape, strict=True))
    linear = (frozenset({0, 1}), frozenset({0, 2}))
    return contraction(call, f"{bias}, {operands} -> {result}", whole=frozenset({"k"}), linear=linear)
