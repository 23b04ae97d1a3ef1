"""Ops that go element by element: the union of the operands, unless one of them decides the result alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from meshwright.compiler.causality.call import Call
from meshwright.compiler.causality.masks import MASKS, lowness
from meshwright.compiler.causality.registry import rule
from meshwright.compiler.causality.shadow import (
    CHOICE,
    MAYBE_LOW,
    Shadow,
    constant,
    meet,
    nothing,
)
from meshwright.compiler.causality.words import softened, union

_STEPS = {
    "round",
    "floor",
    "ceil",
    "trunc",
    "sign",
    "sgn",
    "floor_divide",
    "frac",
    "fake_quantize_per_tensor_affine_cachemask",
}
_COMPARISONS = {"eq", "ne", "lt", "le", "gt", "ge", "floor_divide", "remainder", "fmod", "div", "sub", "add", "clamp"}


@rule(
    "pointwise",
    "aten.fake_quantize_per_tensor_affine_cachemask",
    "aten._fake_quantize_per_tensor_affine_cachemask_tensor_qparams",
)
def pointwise(call: Call) -> Any:
    """Any op that torch marks as pointwise."""
    if call.name.split(".")[1] in _STEPS:
        call.interpreter.notes.steps = True
    values = call.tensors()
    if isinstance(call.out, list | tuple):
        return tuple(elementwise(call, values, out) for out in call.out)
    _notice(call)
    return elementwise(call, values, call.out)


def elementwise(call: Call, values: Sequence[Tensor], out: Tensor) -> Shadow:
    """The union of operands of one shape, in their listing where they are in one."""
    shape = tuple(out.shape)
    shadows = [call.shadow(v).expand(shape) for v in values]
    wide = [v.expand(shape) for v in values]
    shadows, item = call.interpreter.listings.joined(shadows, wide, shape)
    known, deps = constant(shape).known, None
    for shadow in shadows:
        known = meet(known, shadow.known)
        if shadow.deps is not None:
            deps = shadow.deps if deps is None else union(deps, shadow.deps)
    trait = None
    if out.dtype != torch.bool and any(v.dtype == torch.bool for v in values):
        trait = torch.where(known, 0, CHOICE).to(torch.uint8)
    if out.dtype == torch.bool and deps is not None and any(v.dtype != torch.bool for v in values):
        deps = softened(deps)  # a comparison chooses
    return Shadow(known, deps, item, None, trait)


@rule("aten._to_copy", "aten.clone", "aten.contiguous", "aten._unsafe_view", "aten.copy", "aten.detach_copy")
def copied(call: Call) -> Shadow:
    """A copy keeps all that is known; what was true or false becomes a choice when it becomes a number."""
    source = call.arguments["src"] if call.name.startswith("aten.copy.") else call["self"]
    shadow = call.shadow(source)
    if shadow.known.shape != call.out.shape:
        if shadow.known.numel() == call.out.numel():
            shadow = shadow.map(lambda x: x.reshape(call.out.shape), lambda x: x.reshape(*call.out.shape, call.width))
        else:
            shadow = shadow.expand(call.out.shape)
    if source.is_floating_point() and not call.out.is_floating_point() and shadow.deps is not None:
        call.interpreter.notes.steps = True
    if source.dtype == torch.bool and call.out.dtype != torch.bool and shadow.deps is not None:
        trait = torch.where(shadow.known, 0, CHOICE).to(torch.uint8)
        shadow = replace(shadow, trait=trait)
    return shadow


@rule("aten.mul", "aten.logical_and", "aten.bitwise_and", "aten.div", "aten.__and__")
def product(call: Call) -> Shadow:
    """A known zero decides; a choice of zero or one makes the other operand one that is chosen."""
    _notice(call)
    made, a, b = _two(call)
    if b is None:
        return made
    left, right = call["self"], call["other"]
    both = "div" not in call.name
    if "bitwise" in call.name and left.dtype != torch.bool:
        both = False
    zero_a = _is(call, left, a, 0)
    zero_b = _is(call, right, b, 0) if both else torch.zeros((), dtype=torch.bool)
    made = _choose_hard(call, made, a, b, both)
    made = _decide(call, made, zero_a, a)
    return _decide(call, made, zero_b, b)


def _choose_hard(call: Call, made: Shadow, a: Shadow, b: Shadow, both: bool) -> Shadow:
    """The hard plane of x times a choice is that of the choice."""
    if a.trait is None and b.trait is None:
        return _with_masks(call, made, a, b)
    picks_a, picks_b = a.has(CHOICE), b.has(CHOICE) if both else torch.zeros((), dtype=torch.bool)
    if made.deps is None or not (bool(picks_a.any()) or bool(picks_b.any())):
        return _with_masks(call, made, a, b)
    half = call.width // 2
    deps = made.deps.clone()
    words_a, words_b = call.words(a)[..., half:], call.words(b)[..., half:]
    hard = torch.where(picks_b.unsqueeze(-1), 0, words_a) | torch.where(picks_a.unsqueeze(-1), 0, words_b)
    deps[..., half:] = hard
    trait = torch.where(picks_a | picks_b, CHOICE, 0).to(torch.uint8).expand(made.known.shape)
    made = Shadow(made.known, deps, made.item, None, trait)
    return _with_masks(call, made, a, b)


def _with_masks(call: Call, made: Shadow, a: Shadow, b: Shadow) -> Shadow:
    """(1 - mask) times a very low number is a masking number, if the mask says so."""
    if nothing(a.known) and nothing(b.known):
        return made
    low = torch.zeros((), dtype=torch.bool)
    for shadow, name in ((a, "self"), (b, "other")):
        value = call.get(name)
        values = value if isinstance(value, Tensor) else torch.tensor(value if value is not None else 0)
        very = lowness(values) != 0
        if bool(very.any()):
            low = low | (shadow.known & very)
    if nothing(low):
        return made
    here = low & ~made.known
    if not bool(here.any()):
        return made
    trait = torch.where(here, MAYBE_LOW, 0).to(torch.uint8).expand(made.known.shape)
    return replace(made, trait=trait if made.trait is None else made.trait | trait)


@rule("aten.logical_or", "aten.bitwise_or", "aten.__or__")
def disjunction(call: Call) -> Shadow:
    """A known True decides."""
    made, a, b = _two(call)
    if b is None or call.out.dtype != torch.bool:
        return made
    left, right = call["self"], call["other"]
    made = _decide(call, made, _is(call, left, a, 0, equal=False), a)
    return _decide(call, made, _is(call, right, b, 0, equal=False), b)


@rule("aten.add", "aten.sub", "aten.rsub")
def total(call: Call) -> Shadow:
    """A known infinity decides; a masking number stays one."""
    _notice(call)
    made, a, b = _two(call)
    if b is None or not call.out.is_floating_point():
        return made
    left, right = call["self"], call["other"]
    trait = torch.zeros((), dtype=torch.uint8)
    for value, shadow, sign in ((left, a, "rsub" not in call.name), (right, b, "sub" not in call.name)):
        values = value if isinstance(value, Tensor) else torch.tensor(value)
        if sign or "sub" not in call.name:
            if not nothing(shadow.known):
                trait = trait | torch.where(shadow.known, lowness(values, call.out.dtype), 0).to(torch.uint8)
            if shadow.trait is not None:
                trait = trait | (shadow.trait & MASKS)
    if bool(trait.any()):
        trait = torch.where(made.known, 0, trait).to(torch.uint8).expand(made.known.shape)
        made = replace(made, trait=trait)
    made = _decide(call, made, _infinite(left, a), a)
    return _decide(call, made, _infinite(right, b), b)


@rule("aten.addcmul", "aten.addcdiv", "aten.lerp")
def compound(call: Call) -> Any:
    """Three operands; a known zero among the factors decides nothing here but the product."""
    return elementwise(call, call.tensors(), call.out)


@rule("aten.maximum", "aten.minimum", "aten.clamp", "aten.clamp_min", "aten.clamp_max")
def bounded(call: Call) -> Shadow:
    """As any other, and noted as a number of interest."""
    _notice(call)
    return elementwise(call, call.tensors(), call.out)


def _two(call: Call) -> tuple[Shadow, Shadow, Shadow | None]:
    """The general result and both operands, of the result's shape and in one listing."""
    names = [n for n in ("self", "other") if n in call.arguments]
    if len(names) < 2:
        return elementwise(call, call.tensors(), call.out), constant(call.out.shape), None
    shape = tuple(call.out.shape)
    values = [call[n] if isinstance(call[n], Tensor) else torch.tensor(call[n]) for n in names]
    shadows = [call.shadow(call[n]).expand(shape) for n in names]
    shadows, item = call.interpreter.listings.joined(shadows, [v.expand(shape) for v in values], shape)
    a, b = shadows
    deps = b.deps if a.deps is None else a.deps if b.deps is None else union(a.deps, b.deps)
    trait = None
    if call.out.dtype != torch.bool and any(v.dtype == torch.bool for v in values):
        trait = torch.where(a.known & b.known, 0, CHOICE).to(torch.uint8)
    if call.name.startswith(("aten.sub", "aten.add", "aten.rsub")) and (trait is None):
        trait = _still_choice(a, b)
    return Shadow(meet(a.known, b.known), deps, item, None, trait), a, b


def _still_choice(a: Shadow, b: Shadow) -> Tensor | None:
    """1 - choice and choice + choice are choices."""
    if a.trait is None and b.trait is None:
        return None
    picks = (a.has(CHOICE) & (b.known | b.has(CHOICE))) | (b.has(CHOICE) & a.known)
    return torch.where(picks, CHOICE, 0).to(torch.uint8) if bool(picks.any()) else None


def _is(call: Call, value: Any, shadow: Shadow, number: float, equal: bool = True) -> Tensor:
    if nothing(shadow.known):
        return shadow.known
    values = value if isinstance(value, Tensor) else torch.tensor(value)
    return shadow.known & ((values == number) == equal)


def _infinite(value: Any, shadow: Shadow) -> Tensor:
    if nothing(shadow.known):
        return shadow.known
    values = value if isinstance(value, Tensor) else torch.tensor(value)
    return shadow.known & torch.isinf(values)


def _decide(call: Call, made: Shadow, where_decided: Tensor, by: Shadow) -> Shadow:
    """Elements that one operand decides: known, and on nothing that the other brings."""
    if nothing(where_decided):
        return made
    deps = made.deps
    if deps is not None:
        deps = torch.where(where_decided.unsqueeze(-1), call.words(by), deps)
    trait = None if made.trait is None else torch.where(where_decided, 0, made.trait).to(torch.uint8)
    return Shadow(made.known | where_decided, deps, made.item, None, trait)


def _notice(call: Call) -> None:
    """Numbers that tokens are compared with, and whole numbers that positions are compared with."""
    base = call.name.split(".")[1]
    if base not in _COMPARISONS:
        return
    notes = call.interpreter.notes
    for name in ("other", "min", "max"):
        other = call.get(name)
        if isinstance(other, Tensor) and other.numel() == 1 and bool(call.shadow(other).known.all()):
            other = other.item()
        if isinstance(other, float) and other.is_integer():
            other = int(other)
        if isinstance(other, int) and not isinstance(other, bool) and isinstance(call.get("self"), Tensor):
            shadow = call.shadow(call["self"])
            if shadow.deps is not None and not call["self"].is_floating_point():
                notes.numbers.add(other)
            elif shadow.deps is None and 1 < abs(other) < 512 and not call["self"].is_floating_point():
                notes.spans.add(abs(other))
