"""Products of rows that have weights of their own, and counts of numbers."""

from __future__ import annotations

import math

from meshwright.compiler.rules.dims import all_whole, named
from meshwright.compiler.rules.rule import OpCall, Rule, einsum, rule

_EACH = (frozenset({0}), frozenset({1}))


@rule("meshwright.routed_mm")
def routed_mm(call: OpCall) -> Rule:
    """Row ``n`` by the weights of its group: the rows pass."""
    return _product(call, "n d, e d h, n -> n h", frozenset({"e"}))


@rule("meshwright.routed_outer")
def routed_outer(call: OpCall) -> Rule:
    """The gradient of the weights of each group: a sum over the rows."""
    return _product(call, "n d, n h, n -> e d h", frozenset({"e"}), {"e": call.args[3]})


@rule("meshwright.grouped_mm")
def grouped_mm(call: OpCall) -> Rule:
    """Rows in the order of their groups, whose ends are places among all rows: these are whole."""
    return _product(call, "n d, e d h, e -> n h", frozenset({"n", "e"}))


@rule("meshwright.grouped_outer")
def grouped_outer(call: OpCall) -> Rule:
    return _product(call, "n d, n h, e -> e d h", frozenset({"n", "e"}))


def _product(call: OpCall, text: str, whole: frozenset[str], sizes: dict[str, int] | None = None) -> Rule:
    made = einsum(text, call.operands, sizes=sizes or {})
    kept = {f for dims in made.results[0] or () for f in dims}
    summed = frozenset(made.sizes) - kept - whole
    work = 2.0 * math.prod(made.sizes[f] for f in ("n", "d", "h"))
    return Rule(
        made.sizes,
        made.operands,
        made.results,
        reduce=dict.fromkeys(sorted(summed), "sum"),
        whole=whole,
        linear=_EACH,
        relations={**dict.fromkeys(sorted(summed), "all"), **dict.fromkeys(sorted(whole), "data")},
        flops=work,
        accumulates=summed,
    )


@rule("aten.histc")
def histc(call: OpCall) -> Rule:
    """``(x, bins, min, max)``: counts over all elements. Where no range is given it is that of the elements, of which
    all must be known."""
    _, bins, low, high = call.args
    if not low < high:
        return all_whole(call)
    return _counts(call, int(bins), float(high) + 1.0 + abs(float(high)))


@rule("meshwright.count")
def count(call: OpCall) -> Rule:
    """``(x, bins)``: how often each number from 0 on is there; those below 0 are not counted."""
    return _counts(call, int(call.args[1]), -1.0)


def _counts(call: OpCall, bins: int, ignored: float) -> Rule:
    sizes = {"bins": bins}
    dims = named(call.operands[0].shape, "d", sizes)
    over = [f for f in sizes if f != "bins"]
    return Rule(
        sizes,
        (dims,),
        ((("bins",),),),
        reduce=dict.fromkeys(over, "sum"),
        whole=frozenset({"bins"}),
        relations=dict.fromkeys(over, "all"),
        ignored=dict.fromkeys(over, ignored),
    )
