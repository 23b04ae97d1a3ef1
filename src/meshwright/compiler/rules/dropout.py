"""Dropout whose mask belongs to the elements of the whole tensor: a shard is told where it lies in it."""

from __future__ import annotations

from meshwright.compiler.rules.arguments import with_arguments
from meshwright.compiler.rules.dims import named
from meshwright.compiler.rules.rule import LocalCall, OpCall, Rule, Shards, rule


@rule("meshwright.dropout")
def dropout(call: OpCall) -> Rule:
    """``(x, seed, p, site, sizes, offsets)``; linear in x, for the mask does not depend on it."""
    sizes: dict[str, int] = {"seed": 2}
    dims = named(call.operands[0].shape, "d", sizes)

    def local(call: OpCall, unchanged: LocalCall, shards: Shards) -> LocalCall:
        place = shards.result_expanded[0] if shards.result_expanded else None
        if place is None or not shards.cut:
            return unchanged
        return with_arguments(unchanged, {4: list(place[0]), 5: list(place[1])})

    return Rule(
        sizes,
        (dims, (("seed",),)),
        (dims,),
        whole=frozenset({"seed"}),
        linear=(frozenset({0}),),
        relations={"seed": "all"},
        local=local,
        indexed=True,
    )
