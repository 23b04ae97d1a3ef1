"""``meshwright.attention``: batch, heads and query positions pass.

Positions are those of the whole tensor, so a shard is told where its part begins. Forward needs
the keys whole (their softmax is taken inside); backward does not, since it is given logsumexp.
Channels are whole in both: the fused kernels want query and value equally wide.
"""

from __future__ import annotations

from typing import Any

from meshwright.compiler.rules.arguments import operand_at, with_arguments
from meshwright.compiler.rules.dims import broadcast
from meshwright.compiler.rules.rule import Dims, Local, LocalCall, Offset, OpCall, Rule, Shards, einsum, rule


def _mask(call: OpCall, at: int, sizes: dict[str, int]) -> list[Dims]:
    """The dims of the mask, which is broadcast to ``[b h t s]``; and of the seed."""
    found: list[Dims] = []
    number = operand_at(call, at)
    if number is not None:
        dims = tuple((f,) for f in "bhts")
        mask = broadcast(call.operands[number].shape, [sizes[f] for f in "bhts"], dims)
        if mask is None:
            raise ValueError(f"a mask of shape {call.operands[number].shape} is not broadcastable to [b h t s]")
        found.append(mask)
    if operand_at(call, at + 1) is not None:
        found.append((("seed",),))
        sizes["seed"] = 2
    return found


def _positions(at: int, sizes: dict[str, int]) -> Local:
    """Whole sizes and offsets where positions matter: under dropout, or when a cut moves t or s."""

    def local(call: OpCall, unchanged: LocalCall, shards: Shards) -> LocalCall:
        causal, window, _, dropout = call.args[at : at + 4]
        if not (shards.cut & set("bhts")) or not (causal or window or dropout > 0):
            return unchanged
        needed = shards.cut & _contiguous(call, at)
        offsets = [Offset(f) if f in needed else 0 for f in "bhts"]
        return with_arguments(unchanged, {at + 5: [sizes[f] for f in "bhts"], at + 6: offsets})

    return local


def _contiguous(call: OpCall, at: int) -> frozenset[str]:
    """The factors whose offset counts: all that index the dropout mask, time where a mask follows from positions."""
    causal, window, _, dropout = call.args[at : at + 4]
    return frozenset("bhts") if dropout > 0 else frozenset("ts") if causal or window else frozenset()


def _relation(call: OpCall, at: int) -> str:
    """Which keys (s) one query (t) reads, of those that the call is given: parts of them begin at offsets."""
    causal, window = call.args[at], call.args[at + 1]
    offsets = call.args[at + 6]
    if not causal and not window:
        return "all"
    if not all(isinstance(offset, int) for offset in offsets):
        return "all"  # of a program that is not running, whose ranks differ
    ahead = offsets[2] - offsets[3] if offsets else 0
    low = str(ahead + 1 - window) if window else "-inf"
    high = str(ahead) if causal else "inf"
    return {("-inf", "0"): "prefix", ("0", "inf"): "suffix"}.get((low, high), f"[{low},{high}]")


def _flops(call: OpCall, at: int, sizes: dict[str, int], products: int) -> float:
    """Two per product; a causal attention computes half of them."""
    causal = call.args[at]
    work = 2.0 * sizes["b"] * sizes["h"] * sizes["t"] * sizes["s"] * (sizes["c"] + sizes["d"]) * products / 2
    return work / 2 if causal else work


@rule("meshwright.attention")
def attention(call: OpCall) -> Rule:
    """``(query, key, value, mask, seed, causal, window, scale, dropout, site, sizes, offsets)``."""
    made = einsum("b h t c, b h s c, b h s d -> b h t d, b h t", call.operands[:3])
    sizes = dict(made.sizes)
    masks = _mask(call, 3, sizes)
    more: dict[str, Any] = {"aligned": {"s": "t"}} if call.args[5] or call.args[6] else {}
    return Rule(
        sizes,
        (*made.operands, *masks),
        made.results,
        whole=frozenset({"s", "c", "d"} | (sizes.keys() & {"seed"})),
        relations={"s": _relation(call, 5), "c": "all", **({"seed": "all"} if "seed" in sizes else {})},
        local=_positions(5, sizes),
        contiguous=_contiguous(call, 5),
        flops=_flops(call, 5, sizes, 2),
        accumulates=frozenset("sc"),
        **more,
    )


@rule("meshwright.attention_backward")
def attention_backward(call: OpCall) -> Rule:
    """``(grad, query, key, value, mask, seed, out, logsumexp, causal, ...) -> (dquery, dkey, dvalue)``."""
    text = "b h t d, b h t c, b h s c, b h s d -> b h t c, b h s c, b h s d"
    made = einsum(text, call.operands[:4])
    sizes = dict(made.sizes)
    masks = _mask(call, 4, sizes)
    out: Dims = (("b",), ("h",), ("t",), ("d",))
    return Rule(
        sizes,
        (*made.operands, *masks, out, out[:3]),
        made.results,
        reduce={"t": "sum", "s": "sum"},
        whole=frozenset({"c", "d"} | (sizes.keys() & {"seed"})),
        linear=(frozenset({0}),),
        relations={"s": "all", "t": "all", "c": "all", "d": "all", **({"seed": "all"} if "seed" in sizes else {})},
        local=_positions(8, sizes),
        contiguous=_contiguous(call, 8),
        flops=_flops(call, 8, sizes, 5),
        accumulates=frozenset("tscd"),
    )
