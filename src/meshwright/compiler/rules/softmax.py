"""Softmax and log-softmax with their backwards: whole along the dim, all others pass."""

from __future__ import annotations

from meshwright.compiler.rules.arguments import normal_dim
from meshwright.compiler.rules.dims import named
from meshwright.compiler.rules.rule import OpCall, Rule, rule


def _along(call: OpCall, dim: int, linear: tuple[frozenset[int], ...]) -> Rule:
    sizes: dict[str, int] = {}
    dims = named(call.operands[0].shape, "d", sizes)
    whole = frozenset(dims[normal_dim(dim, len(dims))]) if dims else frozenset()
    return Rule(
        sizes,
        (dims,) * len(call.operands),
        (dims,) * len(call.results),
        whole=whole,
        linear=linear,
        relations=dict.fromkeys(whole, "all"),
    )


@rule("aten._softmax", "aten._log_softmax", "aten._safe_softmax", "aten.softmax", "aten.log_softmax")
def softmax(call: OpCall) -> Rule:
    return _along(call, call.args[1], ())


@rule("aten._softmax_backward_data", "aten._log_softmax_backward_data")
def backward(call: OpCall) -> Rule:
    """``(grad, output, dim, dtype)``: linear in the gradient."""
    return _along(call, call.args[2], (frozenset({0}),))
