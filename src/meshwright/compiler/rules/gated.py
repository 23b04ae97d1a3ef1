"""Gated linear units: one half of a dim gates the other, so both halves are cut alike."""

from __future__ import annotations

from meshwright.compiler.rules.arguments import normal_dim
from meshwright.compiler.rules.dims import named
from meshwright.compiler.rules.rule import OpCall, Rule, rule


@rule("aten.glu", "aten.glu_backward")
def glu(call: OpCall) -> Rule:
    shape = call.operands[-1].shape
    dim = normal_dim(call.args[-1], len(shape))
    sizes, half = {"half": 2}, frozenset({"half"})
    small = named((*shape[:dim], shape[dim] // 2, *shape[dim + 1 :]), "d", sizes)
    large = (*small[:dim], ("half", *small[dim]), *small[dim + 1 :])
    if call.name == "aten.glu.default":
        return Rule(sizes, (large,), (small,), whole=half, relations={"half": "all"})
    return Rule(sizes, (small, large), (large,), whole=half, relations={"half": "all"}, linear=(frozenset({0}),))
