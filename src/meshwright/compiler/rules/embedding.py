"""Table lookups. A cut table looks up its own rows and gives zeros elsewhere: the shards' results add up."""

from __future__ import annotations

from meshwright.compiler.rules.arguments import with_arguments
from meshwright.compiler.rules.dims import named
from meshwright.compiler.rules.rule import LocalCall, Offset, OpCall, Rule, Shards, rule


@rule("meshwright.embedding")
def embedding(call: OpCall) -> Rule:
    """``(weight[v d], index[...], start, padding_idx) -> [... d]``."""
    (rows, width), index = call.operands[0].shape, call.operands[1].shape
    sizes = {"v": rows, "d": width}
    places = named(index, "i", sizes)

    def local(call: OpCall, unchanged: LocalCall, shards: Shards) -> LocalCall:
        return with_arguments(unchanged, {2: Offset("v")}) if "v" in shards.cut else unchanged

    return Rule(
        sizes,
        ((("v",), ("d",)), places),
        ((*places, ("d",)),),
        masked=frozenset({"v"}),
        linear=(frozenset({0}),),
        relations={"v": "data"},
        local=local,
    )


@rule("meshwright.embedding_backward")
def embedding_backward(call: OpCall) -> Rule:
    """``(grad[... d], index[...], rows, start, padding_idx) -> [v d]``: each shard makes its own rows."""
    sizes = {"v": call.args[2], "d": call.operands[0].shape[-1]}
    places = named(call.operands[1].shape, "i", sizes)
    summed = {f: "sum" for dim in places for f in dim}

    def local(call: OpCall, unchanged: LocalCall, shards: Shards) -> LocalCall:
        if "v" not in shards.cut:
            return unchanged
        return with_arguments(unchanged, {2: shards.sizes["v"], 3: Offset("v")})

    return Rule(
        sizes,
        ((*places, ("d",)), places),
        ((("v",), ("d",)),),
        reduce=summed,
        masked=frozenset({"v"}),
        linear=(frozenset({0}),),
        relations=dict.fromkeys(summed, "all"),
        local=local,
        accumulates=frozenset(summed),
    )


@rule("aten.embedding")
def aten_embedding(call: OpCall) -> Rule:
    """ATen's own lookup knows no offset, so its table is whole along the rows."""
    (rows, width), index = call.operands[0].shape, call.operands[1].shape
    sizes = {"v": rows, "d": width}
    places = named(index, "i", sizes)
    return Rule(
        sizes,
        ((("v",), ("d",)), places),
        ((*places, ("d",)),),
        whole=frozenset({"v"}),
        linear=(frozenset({0}),),
        relations={"v": "data"},
    )


@rule("aten.embedding_dense_backward")
def aten_embedding_backward(call: OpCall) -> Rule:
    """Scaled by frequency, a row's gradient depends on all places that use it."""
    sizes = {"v": call.args[2], "d": call.operands[0].shape[-1]}
    places = named(call.operands[1].shape, "i", sizes)
    factors = {f for dim in places for f in dim}
    by_frequency = bool(call.args[4])
    return Rule(
        sizes,
        ((*places, ("d",)), places),
        ((("v",), ("d",)),),
        reduce={} if by_frequency else dict.fromkeys(sorted(factors), "sum"),
        whole=frozenset({"v"} | (factors if by_frequency else set())),
        linear=(frozenset({0}),),
        relations=dict.fromkeys(factors, "all"),
        accumulates=frozenset(factors),
    )
