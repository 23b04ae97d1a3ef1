"""What an update adds to ordinary ops for the gradient norm: sums of squares, and one total of many scalars."""

from __future__ import annotations

import math

from meshwright.compiler.rules.dims import named
from meshwright.compiler.rules.rule import OpCall, Rule, rule


@rule("meshwright.total")
def total(call: OpCall) -> Rule:
    """The sum of scalars: jointly linear, so a sum that all of them owe is owed by the total."""
    count = len(call.operands)
    return Rule({}, ((),) * count, ((),), linear=(frozenset(range(count)),))


@rule("meshwright.sum_of_squares")
def sum_of_squares(call: OpCall) -> Rule:
    """The squares of a shard are a part of the sum; the op is not linear, so what is owed is paid before."""
    sizes: dict[str, int] = {}
    dims = named(call.operands[0].shape, "d", sizes)
    relations = dict.fromkeys(sizes, "all")
    flops = 2.0 * math.prod(call.operands[0].shape)
    return Rule(
        sizes,
        (dims,),
        ((),),
        reduce=dict.fromkeys(sizes, "sum"),
        relations=relations,
        flops=flops,
        accumulates=frozenset(sizes),
    )
