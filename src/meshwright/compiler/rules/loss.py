"""Cross entropy and its pieces over a vocabulary that may be cut: no rank ever needs the whole logits."""

from __future__ import annotations

from meshwright.compiler.rules.arguments import with_arguments
from meshwright.compiler.rules.dims import all_whole, listed, named
from meshwright.compiler.rules.rule import Dims, LocalCall, Offset, OpCall, Rule, Shards, rule


def _rows(call: OpCall, at: int) -> tuple[dict[str, int], Dims]:
    """Sizes and row dims of logits ``[... v]``."""
    shape = call.operands[at].shape
    sizes: dict[str, int] = {}
    rows = named(shape[:-1], "i", sizes)
    return {**sizes, "v": shape[-1]}, rows


@rule("meshwright.logsumexp")
def logsumexp(call: OpCall) -> Rule:
    sizes, rows = _rows(call, 0)
    return Rule(
        sizes,
        ((*rows, ("v",)),),
        (rows,),
        reduce={"v": "logsumexp"},
        relations={"v": "all"},
        accumulates=frozenset({"v"}),
    )


@rule("meshwright.pick")
def pick(call: OpCall) -> Rule:
    """``(x[... v], index[...], start) -> x[..., index - start]``, 0 where the shard has no such class."""
    sizes, rows = _rows(call, 0)

    def local(call: OpCall, unchanged: LocalCall, shards: Shards) -> LocalCall:
        return with_arguments(unchanged, {2: Offset("v")}) if "v" in shards.cut else unchanged

    return Rule(
        sizes,
        ((*rows, ("v",)), rows),
        (rows,),
        masked=frozenset({"v"}),
        linear=(frozenset({0}),),
        relations={"v": "data"},
        local=local,
    )


@rule("meshwright.cross_entropy")
def cross_entropy(call: OpCall) -> Rule:
    """Not taken apart, the op needs all classes."""
    sizes, rows = _rows(call, 0)
    return Rule(
        sizes,
        ((*rows, ("v",)), rows),
        (rows, rows),
        whole=frozenset({"v"}),
        relations={"v": "all"},
        accumulates=frozenset({"v"}),
    )


@rule("meshwright.cross_entropy_backward")
def cross_entropy_backward(call: OpCall) -> Rule:
    """``(grad, logits[... v], target, logsumexp, start)``: given logsumexp, classes are independent."""
    sizes, rows = _rows(call, 1)
    logits = (*rows, ("v",))

    def local(call: OpCall, unchanged: LocalCall, shards: Shards) -> LocalCall:
        return with_arguments(unchanged, {4: Offset("v")}) if "v" in shards.cut else unchanged

    return Rule(
        sizes, (rows, logits, rows, rows), (logits,), contiguous=frozenset({"v"}), linear=(frozenset({0}),), local=local
    )


@rule("aten.nll_loss_forward", "aten.nll_loss_backward")
def nll_loss(call: OpCall) -> Rule:
    """ATen's own: rows pass when nothing is reduced over them; classes are whole."""
    backward = "backward" in call.name
    reduction = call.args[4 if backward else 3]
    at = 1 if backward else 0
    shape = call.operands[at].shape
    if reduction != 0 or len(shape) != 2:
        return all_whole(call)
    sizes = {"n": shape[0], "v": shape[1]}
    logits: Dims = (("n",), ("v",))
    rows: Dims = (("n",),)
    known = {2: logits, 1: rows, 0: ()}
    operands = [known[len(t.shape)] for t in call.operands]
    weight = 3 if backward else 2
    if call.args[weight] is not None:
        operands[weight] = (("v",),)
    results = tuple(known[len(r.shape)] if r is not None else None for r in call.results)
    whole = listed((("v",),))
    return Rule(
        sizes,
        tuple(operands),
        results,
        whole=whole,
        linear=(frozenset({0}),) if backward else (),
        relations={"v": "data"},
    )
