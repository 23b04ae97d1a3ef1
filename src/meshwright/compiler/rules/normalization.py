"""Layer, RMS, group and batch norm with their backwards.

Rows pass; in a backward they also are what the gradients of weight and bias are summed over. The
dims over which the statistics are taken are whole.
"""

from __future__ import annotations

import math
from typing import Any

from meshwright.compiler.rules.arguments import operand_at, operands_at, with_arguments
from meshwright.compiler.rules.dims import all_whole, listed, named
from meshwright.compiler.rules.rule import Dims, LocalCall, OpCall, Rule, Shards, rule


def _rows(call: OpCall, at: int, normalized: int) -> tuple[dict[str, int], Dims, Dims, Dims]:
    """``sizes``, the dims of the input, of its statistics, and of weight and bias."""
    sizes: dict[str, int] = {}
    dims = named(call.operands[at].shape, "d", sizes)
    rows = len(dims) - normalized
    return sizes, dims, (*dims[:rows], *((),) * normalized), dims[rows:]


@rule("aten.native_layer_norm", "aten._fused_rms_norm", "meshwright.rms_norm")
def row_norm(call: OpCall) -> Rule:
    """``(x, normalized_shape, weight, [bias,] eps) -> (y, [mean,] rstd)``."""
    sizes, dims, statistics, weights = _rows(call, 0, len(call.args[1]))
    whole = listed(weights)
    return Rule(
        sizes,
        (dims, *[weights] * (len(call.operands) - 1)),
        (dims, *[statistics] * (len(call.results) - 1)),
        whole=whole,
        relations=dict.fromkeys(whole, "all"),
        accumulates=whole,
    )


@rule("aten.native_layer_norm_backward", "aten._fused_rms_norm_backward", "meshwright.rms_norm_backward")
def row_norm_backward(call: OpCall) -> Rule:
    """``(grad, x, normalized_shape, [mean,] rstd, weight, [bias,] mask) -> (dx, dweight, [dbias])``."""
    sizes, dims, statistics, weights = _rows(call, 1, len(call.args[2]))
    whole = listed(weights)
    operands = [dims, dims]
    names = ("mean", "rstd", "weight", "bias") if "layer" in call.name else ("rstd", "weight")
    for position, name in enumerate(names, start=3):
        if operand_at(call, position) is not None:
            operands.append(statistics if name in ("mean", "rstd") else weights)
    results = tuple(d if r is not None else None for d, r in zip((dims, weights, weights), call.results, strict=False))
    rows = listed(statistics)
    return Rule(
        sizes,
        tuple(operands),
        results,
        reduce=dict.fromkeys(sorted(rows), "sum") if any(r is not None for r in results[1:]) else {},
        dense=frozenset(range(len(operands))),
        whole=whole,
        linear=(frozenset({0}),),
        relations=dict.fromkeys(whole, "all"),
        accumulates=whole | rows,
    )


@rule("aten.native_group_norm", "aten.native_group_norm_backward")
def group_norm(call: OpCall) -> Rule:
    """Channels are ``(g c)``: samples and groups pass, what a group holds is whole."""
    backward = "backward" in call.name
    at = 5 if backward else 3
    count, _, _, groups = call.args[at : at + 4]
    shape = call.operands[1 if backward else 0].shape
    sizes = {"n": count, "g": groups, "c": shape[1] // groups}
    image: Dims = (("n",), ("g", "c"), *named(shape[2:], "s", sizes))
    statistics: Dims = (("n",), ("g",))
    weights: Dims = (("g", "c"),)
    whole = frozenset(f for f in sizes if f not in ("n", "g"))

    def local(call: OpCall, unchanged: LocalCall, shards: Shards) -> LocalCall:
        channels = shards.sizes["g"] * shards.sizes["c"]
        places = math.prod(shards.sizes[f] for dim in image[2:] for f in dim)
        changes = {at: shards.sizes["n"], at + 1: channels, at + 2: places, at + 3: shards.sizes["g"]}
        return with_arguments(unchanged, changes)

    more: dict[str, Any] = {
        "whole": whole,
        "relations": dict.fromkeys(whole, "all"),
        "local": local,
        "dense": frozenset(range(len(call.operands))),
        "accumulates": whole | ({"n"} if backward else frozenset()),
    }
    if not backward:
        operands = (image, *[weights] * (len(call.operands) - 1))
        return Rule(sizes, operands, (image, statistics, statistics), **more)
    operands = (image, image, statistics, statistics, *[weights] * (len(call.operands) - 4))
    results = tuple(d if r is not None else None for d, r in zip((image, weights, weights), call.results, strict=True))
    reduce = {"n": "sum"} if any(r is not None for r in results[1:]) else {}
    return Rule(sizes, operands, results, reduce=reduce, linear=(frozenset({0}),), **more)


@rule(
    "aten.native_batch_norm",
    "aten._native_batch_norm_legit",
    "aten._native_batch_norm_legit_functional",
    "aten.native_batch_norm_backward",
)
def batch_norm(call: OpCall) -> Rule:
    """Channels pass. In training the batch is what the statistics are taken over, so it is whole."""
    backward = "backward" in call.name
    shape = call.operands[0].shape
    sizes: dict[str, int] = {}
    image = named(shape, "d", sizes)
    # in evaluation the saved statistics are empty
    if len(shape) < 2 or any(r is not None and r.shape == (0,) for r in call.results):
        return all_whole(call)
    whole = frozenset(sizes) - listed(image[1:2])
    channels: Dims = image[1:2]
    images = operands_at(call, 0, 1) if backward else operands_at(call, 0)
    operands = tuple(image if n in images else channels for n in range(len(call.operands)))
    results = tuple(None if r is None else image if n == 0 else channels for n, r in enumerate(call.results))
    return Rule(
        sizes,
        operands,
        results,
        whole=whole,
        linear=(frozenset({0}),) if backward else (),
        relations=dict.fromkeys(whole, "all"),
        accumulates=whole,
    )
