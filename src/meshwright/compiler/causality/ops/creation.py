"""Ops that look at the shape of what they are given, and ops that draw at random: nothing is depended on."""

from __future__ import annotations

from typing import Any

from meshwright.compiler.causality.call import Call, tensors_in
from meshwright.compiler.causality.ops.pointwise import elementwise
from meshwright.compiler.causality.registry import rule
from meshwright.compiler.causality.shadow import Shadow, constant
from meshwright.compiler.causality.words import any_over


@rule(
    *(f"aten.{name}" for name in ("zeros_like", "ones_like", "full_like", "new_zeros", "new_ones", "new_full")),
    *(f"aten.{name}" for name in ("fill", "zero")),
)
def filled(call: Call) -> Shadow:
    """A constant, unless the number to fill with is computed."""
    value = call.get("value", call.get("fill_value"))
    shadow = call.shadow(value)
    return Shadow(shadow.known, shadow.deps).expand(call.out.shape)


@rule(
    *(f"aten.{name}" for name in ("empty_like", "new_empty", "new_empty_strided", "rand_like", "randn_like")),
    *(f"aten.{name}" for name in ("randint_like", "uniform", "normal_functional", "exponential", "geometric")),
    *(f"aten.{name}" for name in ("log_normal", "cauchy", "random", "empty_strided", "empty", "rand", "randn")),
    *(f"aten.{name}" for name in ("randint", "randperm", "bernoulli.p", "empty_permuted")),
)
def drawn(call: Call) -> Shadow:
    """Not known, and on nothing."""
    return constant(call.out.shape, False)


@rule("aten.native_dropout")
def dropout(call: Call) -> Any:
    """As the identity: what is dropped is by chance."""
    shadow = call.shadow(call["input"])
    known = shadow.known & (call["input"] == 0)
    mask = tensors_in(call.out)[1]
    return Shadow(known, shadow.deps, shadow.item, None, shadow.trait), constant(mask.shape, False)


@rule("aten.multinomial")
def multinomial(call: Call) -> Shadow:
    """A draw from each row's weights."""
    shadow = call.settled(call["self"])
    deps = None if shadow.deps is None else any_over(shadow.deps, (shadow.known.dim() - 1,), keepdim=True)
    return Shadow(constant(call.out.shape, False).known, None if deps is None else deps.expand(*call.out.shape, -1))


@rule("aten.bernoulli", "aten.normal.Tensor_float", "aten.normal.Tensor_Tensor", "aten.poisson")
def drawn_by(call: Call) -> Shadow:
    """Drawn element by element from given chances."""
    made = elementwise(call, call.tensors(), call.out)
    return Shadow(made.known & False, made.deps, made.item)
