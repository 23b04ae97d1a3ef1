"""Views that regroup elements: view, reshape, flatten, squeeze, expand, permute and their kin.

``[b, t, d] -> [b*t, d]`` is ``b t d -> (b t) d``: both shapes are written over common factors,
so that a cut of ``t`` stays a cut of the same elements whatever the shape.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from meshwright.compiler.rules.arguments import (
    normal_dim,
    normal_dims,
    result_shape_at,
    with_arguments,
)
from meshwright.compiler.rules.dims import all_whole, broadcast, named
from meshwright.compiler.rules.rule import Dims, LocalCall, OpCall, Rule, Shards, rule

_LINEAR = (frozenset({0}),)


def common_factors(source: Sequence[int], target: Sequence[int]) -> Rule:
    """The rule of a reshape: both shapes over their common factors, major to minor.

    Where no common factor is left (``[3, 4] -> [2, 6]``), the dims up to the next common border are whole.
    """
    sizes: dict[str, int] = {}
    whole: set[str] = set()
    sides: tuple[list[list[str]], list[list[str]]] = ([[] for _ in source], [[] for _ in target])
    left = [list(source), list(target)]
    at = [0, 0]

    def factor(side: int, name: str, size: int) -> None:
        sizes[name] = size
        sides[side][at[side]].append(name)
        left[side][at[side]] //= size

    def skip() -> None:
        for side in (0, 1):
            while at[side] < len(left[side]) and left[side][at[side]] == 1:
                at[side] += 1

    def entire(side: int) -> int:
        """What is left of the present dim becomes one whole factor."""
        size = left[side][at[side]]
        name = f"w{len(sizes)}"
        whole.add(name)
        factor(side, name, size)
        skip()
        return size

    skip()
    while at[0] < len(source) and at[1] < len(target):
        common = math.gcd(left[0][at[0]], left[1][at[1]])
        if common > 1:
            name = f"f{len(sizes)}"
            for side in (0, 1):
                factor(side, name, common)
        else:
            products = [entire(0), entire(1)]
            while products[0] != products[1]:
                behind = 0 if products[0] < products[1] else 1
                products[behind] *= entire(behind)
        skip()
    operand, result = (tuple(map(tuple, side)) for side in sides)
    relations = {f: "all" for f in whole if any(f in d for d in operand)}
    return Rule(sizes, (operand,), (result,), whole=frozenset(whole), linear=_LINEAR, relations=relations)


def _reshape(call: OpCall) -> Rule:
    result = call.results[0]
    if result is None or 0 in call.operands[0].shape:
        return all_whole(call)
    return common_factors(call.operands[0].shape, result.shape)


@rule(
    "aten.view.default", "aten._unsafe_view", "aten.reshape", "aten.flatten", "aten.unflatten", "aten.view_copy.default"
)
def view(call: OpCall) -> Rule:
    """A shard need not have the strides that a view asks for, so it is reshaped."""

    def local(call: OpCall, unchanged: LocalCall, shards: Shards) -> LocalCall:
        return LocalCall("aten.reshape.default", (unchanged.args[0], list(shards.result_shapes[0] or ())), {})

    return replace(_reshape(call), local=local)


@rule("aten.unsqueeze")
def unsqueeze(call: OpCall) -> Rule:
    return _reshape(call)


@rule("aten.squeeze")
def squeeze(call: OpCall) -> Rule:
    """Only the dims that are of size 1 in the whole tensor go: a shard may have more of them."""
    shape = call.operands[0].shape
    given = normal_dims(call.args[1] if len(call.args) > 1 else None, len(shape))
    ones = [d for d in given if shape and shape[d] == 1]

    def local(call: OpCall, unchanged: LocalCall, shards: Shards) -> LocalCall:
        if not ones:
            return LocalCall("aten.alias.default", unchanged.args[:1], {})
        return LocalCall("aten.squeeze.dims", (unchanged.args[0], ones), {})

    return replace(_reshape(call), local=local)


@rule("aten.expand")
def expand(call: OpCall) -> Rule:
    """The new dims are factors of the result alone: a cut makes each shard expand to its own size."""
    result = call.results[0]
    if result is None:
        return all_whole(call)
    sizes: dict[str, int] = {}
    dims = named(result.shape, "d", sizes)
    operand = broadcast(call.operands[0].shape, result.shape, dims)
    if operand is None:
        return all_whole(call)
    return Rule(sizes, (operand,), (dims,), linear=_LINEAR, local=result_shape_at(1))


@rule("aten.repeat")
def repeat(call: OpCall) -> Rule:
    """``[n] -> [(r n)]``: the repeats are a factor of the result alone."""
    shape = call.operands[0].shape
    repeats = tuple(call.args[1])
    sizes: dict[str, int] = {}
    operand = named(shape, "d", sizes)
    padded: Dims = ((),) * (len(repeats) - len(shape)) + operand
    result: list[tuple[str, ...]] = []
    for i, (count, factors) in enumerate(zip(repeats, padded, strict=True)):
        if count > 1:
            sizes[f"r{i}"] = count
        result.append(((f"r{i}",) if count > 1 else ()) + factors)

    def local(call: OpCall, unchanged: LocalCall, shards: Shards) -> LocalCall:
        counts = [shards.sizes.get(f"r{i}", count) for i, count in enumerate(repeats)]
        return with_arguments(unchanged, {1: counts})

    return Rule(sizes, (operand,), (tuple(result),), linear=_LINEAR, local=local)


@rule("aten.permute", "aten.transpose", "aten.t", "aten.movedim", "aten.swapaxes", "aten.numpy_T", "aten.mT")
def permute(call: OpCall) -> Rule:
    """The same factors in another order."""
    shape = call.operands[0].shape
    sizes: dict[str, int] = {}
    operand = named(shape, "d", sizes)
    order = _order(call, len(shape))
    return Rule(sizes, (operand,), (tuple(operand[i] for i in order),), linear=_LINEAR)


def _order(call: OpCall, ndim: int) -> list[int]:
    op = call.name.split(".")[1]
    order = list(range(ndim))
    if op == "permute":
        return [normal_dim(d, ndim) for d in call.args[1]]
    if op == "movedim":
        source, target = (normal_dims(a, ndim) for a in call.args[1:3])
        rest = [d for d in order if d not in source]
        for place, dim in sorted(zip(target, source, strict=True)):
            rest.insert(place, dim)
        return rest
    if op in ("transpose", "swapaxes"):
        first, second = (normal_dim(d, ndim) for d in call.args[1:3])
        order[first], order[second] = order[second], order[first]
        return order
    if op == "mT":
        return [*order[:-2], ndim - 1, ndim - 2]
    return order[::-1]
