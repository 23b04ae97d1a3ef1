"""Products: an einsum over names, two operands at a time, or element by element when no axis is summed."""

from __future__ import annotations

from dataclasses import replace

from meshwright.compiler.diagnostics import Span, error
from meshwright.frontend.language.term import Term, align, union, widest


def product(factors: list[Term], span: Span, axes: tuple[str, ...] | None, where: Span | None) -> Term:
    """The product of ``factors``; axes that ``axes`` does not name are summed.

    Without ``axes``, see :func:`_unnamed`. ``where`` is the place of the named result.
    """
    scalars = [f for f in factors if not f.axes]
    tensors = [f for f in factors if f.axes]
    for factor in tensors:
        if factor.integer and len(tensors) > 1:
            raise error("E0217", "an integer tensor in a product", factor.span, "look rows up with 'table[integers]'")
    if not tensors:
        result = scalars[0]
        scalars = scalars[1:]
    elif axes is None:
        result = tensors[0]
        for factor in tensors[1:]:
            result = _unnamed(result, factor, span)
    else:
        result = _named(tensors, axes, span, where or span)
    for scalar in scalars:
        code, weight = f"({result.code} * {scalar.code})", result.weight and scalar.weight
        result = replace(result, code=code, span=span, weight=weight, is_constant=False, constant=None)
    return replace(result, span=span)


def _named(factors: list[Term], axes: tuple[str, ...], span: Span, where: Span) -> Term:
    """Left to right; an axis is summed as soon as neither the result nor a later factor names it."""
    present = union(factors)
    for axis in axes:
        if axis not in present:
            raise error(
                "E0205",
                f"the result names axis '{axis}', which no factor has",
                where,
                f"remove '{axis}' from the result, or multiply by a tensor that has it",
            )
    for axis in present:
        holders = [f for f in factors if axis in f.axes]
        if axis not in axes and len(holders) == 1:
            raise error(
                "E0206",
                f"axis '{axis}' is named by one factor alone ({holders[0].named()}) and absent from the result",
                where,
                f"name '{axis}' in the result, or sum it first with 'sum(... over {axis})'",
            )
    result = factors[0]
    for position, factor in enumerate(factors[1:], 1):
        later = {axis for f in factors[position + 1 :] for axis in f.axes}
        both = union([result, factor])
        last = position == len(factors) - 1
        kept = axes if last else tuple(axis for axis in both if axis in axes or axis in later)
        result = _pair(result, factor, kept, span)
    return result


def _unnamed(left: Term, right: Term, span: Span) -> Term:
    """A product whose result is not named.

    Element by element when one factor has all axes of the other. A weight times an activation, each with an axis
    of its own, is the usual matrix product: the shared axes are summed. All else has to be said.
    """
    wide = widest([left, right])
    if wide is not None:
        return _pair(left, right, wide.axes, span)
    shared = tuple(axis for axis in left.axes if axis in right.axes)
    if left.weight == right.weight or not shared:
        raise error(
            "E0207",
            f"the product of {left.named()} and {right.named()} may mean several things",
            span,
            "name the axes of its result: '... -> [axes]', in brackets if it stands inside an expression",
        )
    activation, weight = (right, left) if left.weight else (left, right)
    kept = tuple(axis for term in (activation, weight) for axis in term.axes if axis not in shared)
    return _pair(left, right, kept, span)


def _pair(left: Term, right: Term, kept: tuple[str, ...], span: Span) -> Term:
    """Two factors, summed over the axes that are not kept."""
    weight = left.weight and right.weight
    if set(kept) == set(union([left, right])):
        return Term(kept, f"({align(left, kept)} * {align(right, kept)})", span, weight=weight)
    letters = _letters(union([left, right]))
    equation = ",".join("".join(letters[axis] for axis in term.axes) for term in (left, right))
    equation += "->" + "".join(letters[axis] for axis in kept)
    return Term(kept, f'torch.einsum("{equation}", {left.code}, {right.code})', span, weight=weight)


def _letters(axes: tuple[str, ...]) -> dict[str, str]:
    """A letter for every axis: its own first letter where that is free."""
    letters: dict[str, str] = {}
    for axis in axes:
        choices = [axis[0].lower(), axis[0].upper(), *"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"]
        letters[axis] = next(c for c in choices if c.isalpha() and c.isascii() and c not in letters.values())
    return letters
