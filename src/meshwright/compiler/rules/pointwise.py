"""Element-wise ops: operands are broadcast by their trailing dims, and every dim passes.

The rule itself needs no table: ``rule_of`` uses :func:`pointwise` for any op that ATen tags as
pointwise. What the tag does not say is which operands the op is linear in; that is written here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from meshwright.compiler.rules.arguments import operand_at, operands_at
from meshwright.compiler.rules.dims import all_whole, broadcast, is_float, named
from meshwright.compiler.rules.rule import Dims, OpCall, Rule, TensorType, rule

Groups = tuple[frozenset[int], ...]


def pointwise(call: OpCall) -> Rule:
    """Every dim of the result is a factor; operands are aligned with it from the last dim."""
    first = call.results[0]
    if first is None:
        return all_whole(call)
    sizes: dict[str, int] = {}
    result = named(first.shape, "d", sizes)
    operands: list[Dims] = []
    for operand in call.operands:
        dims = broadcast(operand.shape, first.shape, result)
        if dims is None:
            return all_whole(call)
        operands.append(dims)
    if any(r is not None and r.shape != first.shape for r in call.results):
        return all_whole(call)
    results = tuple(result if r is not None else None for r in call.results)
    return Rule(sizes, tuple(operands), results, linear=_linear(call))


def _linear(call: OpCall) -> Groups:
    function = _LINEAR.get(call.name) or _LINEAR.get(call.name.rpartition(".")[0])
    return function(call) if function else ()


def _first(call: OpCall) -> Groups:
    return (frozenset({0}),)


def _sum(call: OpCall) -> Groups:
    """``add`` and its like: both operands together; a number is added once, so it must be zero."""
    numbers = [a for a in call.args[:2] if not isinstance(a, TensorType)]
    return () if any(n != 0 for n in numbers) else (operands_at(call, 0, 1),)


def _product(call: OpCall) -> Groups:
    return tuple(frozenset({n}) for n in sorted(operands_at(call, 0, 1)))


def _quotient(call: OpCall) -> Groups:
    return (frozenset({0}),) if isinstance(call.args[0], TensorType) else ()


def _where(call: OpCall) -> Groups:
    if len(call.args) < 3:
        return ()
    numbers = [a for a in call.args[1:3] if not isinstance(a, TensorType)]
    branches = operands_at(call, 1, 2)
    return (branches,) if branches and all(n == 0 for n in numbers) else ()


def _masked_fill(call: OpCall) -> Groups:
    value = operand_at(call, 2)
    if value is not None:
        return (frozenset({0, value}),)
    return (frozenset({0}),) if call.args[2] == 0 else ()


def _lerp(call: OpCall) -> Groups:
    return (frozenset({0, 1}),)


def _addcmul(call: OpCall) -> Groups:
    return (frozenset({0, 1}), frozenset({0, 2}))


def _cast(call: OpCall) -> Groups:
    """A cast is linear (to rounding) between floats; to an integer it rounds, from a boolean it tests."""
    source, target = call.operands[0].dtype, call.results[0].dtype if call.results[0] else ""
    if source == target or (is_float(source) and is_float(target)):
        return (frozenset({0}),)
    return ()


_BACKWARD = (
    "gelu silu sigmoid tanh threshold hardtanh leaky_relu elu softplus hardswish hardsigmoid log_sigmoid native_dropout"
).split()

_LINEAR: dict[str, Callable[[OpCall], Groups]] = {
    "aten.add": _sum,
    "aten.sub": _sum,
    "aten.rsub": _sum,
    "aten.mul": _product,
    "aten.div.Tensor": _quotient,
    "aten.div.Scalar": _quotient,
    "aten.true_divide": _quotient,
    "aten.neg": _first,
    "aten.positive": _first,
    "aten.where": _where,
    "aten.masked_fill": _masked_fill,
    "aten.lerp": _lerp,
    "aten.addcmul": _addcmul,
    "aten.addcdiv": _lerp,
    **{f"aten.{op}_backward": _first for op in _BACKWARD},
}


@rule(
    "aten.clone",
    "aten.detach",
    "aten.alias",
    "aten.contiguous",
    "aten.lift_fresh_copy",
    "aten.lift_fresh",
    "aten.view.dtype",
)
def identity(call: OpCall) -> Rule:
    made = pointwise(call)
    return replace(made, linear=(frozenset({0}),)) if call.name != "aten.view.dtype" else made


@rule("aten._to_copy", "aten.to", "prims.convert_element_type")
def cast(call: OpCall) -> Rule:
    return replace(pointwise(call), linear=_cast(call))


@rule("aten.copy")
def copy(call: OpCall) -> Rule:
    """``copy(into, source)``: the first operand gives its shape and dtype alone."""
    same = call.operands[0].dtype == call.operands[1].dtype
    return replace(pointwise(call), linear=(frozenset({1}),) if same else (), unread=frozenset({0}))


@rule("aten.fill", "aten.zero")
def fill(call: OpCall) -> Rule:
    value = operand_at(call, 1)
    linear = (frozenset({value}),) if value is not None else ()
    return replace(pointwise(call), linear=linear, unread=frozenset({0}))


@rule(
    "aten.log_sigmoid_forward",
    "aten.log_sigmoid_backward",
    "aten.where.ScalarSelf",
    "aten.where.ScalarOther",
    "aten.where.Scalar",
    "aten.masked_fill.Tensor",
    "aten.elu_backward",
    "aten.hardswish_backward",
    "aten.softplus_backward",
    "aten.leaky_relu_backward",
    "aten.hardsigmoid_backward",
    "aten.hardtanh_backward",
    "aten.isin.Tensor_Scalar",
    "aten.polar",
)
def untagged(call: OpCall) -> Rule:
    """Element-wise ops that ATen does not tag as such."""
    return pointwise(call)
