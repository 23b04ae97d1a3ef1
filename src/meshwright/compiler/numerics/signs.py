"""Which values of a graph are never negative, so that sums of them are coherent."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from meshwright.compiler.graph import collectives
from meshwright.compiler.graph.adapter import OpOverload, overload_name
from meshwright.compiler.numerics.casts import dtype_of

_ALWAYS = {
    "abs", "exp", "relu", "sigmoid", "softmax", "_softmax", "sqrt", "rsqrt", "linalg_vector_norm", "var", "one_hot",
    "ones", "ones_like", "count_nonzero", "zeros", "zeros_like", "softplus", "square", "norm",
}  # fmt: skip
_OF_ALL = {
    "add", "mul", "div", "sum", "mean", "cumsum", "max", "amax", "min", "amin", "cat", "stack", "_to_copy", "clone",
    "maximum", "minimum", "where", "index_select", "embedding", "repeat", "constant_pad_nd", "total", "fill",
}  # fmt: skip
DEPTH = 40
"""How far back a value is followed."""


def nonnegative(node: Any, depth: int = DEPTH) -> bool:
    """Whether no element of a value is negative, as far as its ops tell. Numbers count as themselves."""
    if isinstance(node, (bool, int, float)):
        return node >= 0
    if not isinstance(node, fx.Node):
        return True  # a dtype, a shape, a name
    dtype = dtype_of(node)
    if dtype == torch.bool:
        return True
    if depth == 0 or node.op != "call_function":
        return False
    target = node.target
    if not isinstance(target, OpOverload):
        passes = target in (collectives.all_reduce, collectives.reduce_scatter, collectives.all_gather)
        return passes and nonnegative(node.args[0], depth - 1)
    name = overload_name(target).split(".")[1]
    if name in _ALWAYS:
        return True
    arguments: tuple[Any, ...] = node.args
    if name == "pow" and isinstance(arguments[1], (int, float)) and arguments[1] % 2 == 0:
        return True
    if name in ("full", "full_like", "scalar_tensor"):
        return nonnegative(arguments[-1] if name != "scalar_tensor" else arguments[0], depth - 1)
    if name == "mul" and arguments[0] is arguments[1]:
        return True
    if name == "addcmul" and arguments[1] is arguments[2]:
        return nonnegative(arguments[0], depth - 1)
    viewed = any(r.alias_info is not None for r in target._schema.returns)
    if name in _OF_ALL:
        values = arguments[0] if isinstance(arguments[0], (list, tuple)) else _operands(name, arguments)
        return all(nonnegative(v, depth - 1) for v in values)
    return viewed and nonnegative(arguments[0], depth - 1)


def _operands(name: str, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """Those arguments that values come from."""
    if name in ("add", "mul", "div", "maximum", "minimum"):
        return arguments[:2]
    return arguments[1:3] if name == "where" else arguments[:1]
