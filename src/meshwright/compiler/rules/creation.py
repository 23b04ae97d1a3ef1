"""Ops that make a tensor: constant ones are made at a shard's own size, those that count are whole."""

from __future__ import annotations

from dataclasses import replace

from meshwright.compiler.rules.arguments import result_shape_at
from meshwright.compiler.rules.dims import all_whole, named
from meshwright.compiler.rules.rule import OpCall, Rule, rule


def _constant(call: OpCall, at: int) -> Rule:
    result = call.results[0]
    if result is None:
        return all_whole(call)
    sizes: dict[str, int] = {}
    dims = named(result.shape, "d", sizes)
    return Rule(sizes, (), (dims,), local=result_shape_at(at))


@rule("aten.zeros", "aten.ones", "aten.full", "aten.empty.memory_format")
def constant(call: OpCall) -> Rule:
    return _constant(call, 0)


@rule("aten.new_zeros", "aten.new_ones", "aten.new_full", "aten.new_empty")
def constant_of_dtype(call: OpCall) -> Rule:
    """The given tensor lends its dtype alone, so it may lie in any way."""
    made = _constant(call, 1)
    sizes = dict(made.sizes)
    operand = named(call.operands[0].shape, "x", sizes)
    return replace(made, sizes=sizes, operands=(operand,), unread=frozenset({0}))


@rule("aten.zeros_like", "aten.ones_like", "aten.full_like", "aten.empty_like")
def like(call: OpCall) -> Rule:
    sizes: dict[str, int] = {}
    dims = named(call.operands[0].shape, "d", sizes)
    return Rule(sizes, (dims,), (dims,), unread=frozenset({0}))


@rule("aten.arange", "aten.linspace", "aten.eye", "aten.scalar_tensor", "aten.tril_indices", "aten.triu_indices")
def counted(call: OpCall) -> Rule:
    """Every rank makes all of it (it is cheap) and keeps its part."""
    return all_whole(call)
