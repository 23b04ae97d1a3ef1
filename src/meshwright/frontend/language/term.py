"""A checked expression: the named axes of its value and the Python that computes it."""

from __future__ import annotations

import keyword
from collections.abc import Iterable
from dataclasses import dataclass, replace

from torch import nn

from meshwright.compiler.diagnostics import Span, error
from meshwright.frontend.language.sizes import Constant

_TAKEN = {"self", "torch", "F", "operations", "imported", "block"}


@dataclass(frozen=True)
class Term:
    """``axes`` in the order of the tensor's dims; ``weight`` when made of parameters alone.

    A value known without running anything has ``is_constant``, no axes, and its value in ``constant``.
    """

    axes: tuple[str, ...]
    code: str
    span: Span
    integer: bool = False
    weight: bool = False
    is_constant: bool = False
    constant: Constant = None

    def named(self) -> str:
        """``[b t d]``, for messages."""
        return f"[{' '.join(self.axes)}]"


def constant_term(value: Constant, span: Span) -> Term:
    return Term((), repr(value), span, weight=True, is_constant=True, constant=value)


def python_name(name: str) -> str:
    """The name of a variable of the file in the generated Python."""
    special = keyword.iskeyword(name) or name in _TAKEN or name.startswith("__") or name.endswith("_")
    return f"{name}_" if special else name


def attribute_fault(name: str) -> str | None:
    """Why a module cannot have an attribute called ``name``, or None if it can."""
    if keyword.iskeyword(name) or name.startswith("__"):
        return f"'{name}' is a word of Python"
    if hasattr(nn.Module, name) or name in ("predict", "parameters_of_file"):
        return f"'{name}' is a name that torch modules use"
    return None


def reorder(term: Term, axes: tuple[str, ...]) -> Term:
    """The term with its dims in the order ``axes``, which names the same set."""
    if term.axes == axes:
        return term
    order = ", ".join(str(term.axes.index(axis)) for axis in axes)
    return replace(term, axes=axes, code=f"{term.code}.permute({order})")


def align(term: Term, axes: tuple[str, ...]) -> str:
    """Code that broadcasts against a tensor with ``axes``: dims in that order, ones where it lacks one."""
    present = tuple(axis for axis in axes if axis in term.axes)
    code = reorder(term, present).code
    if not present:
        return code
    first = axes.index(present[0])
    for position in range(first, len(axes)):
        if axes[position] not in present:
            code += f".unsqueeze({position - first})"
    return code


def union(terms: Iterable[Term]) -> tuple[str, ...]:
    """All axes in order of first appearance."""
    return tuple(dict.fromkeys(axis for term in terms for axis in term.axes))


def widest(terms: list[Term]) -> Term | None:
    """The first term that has every axis of all of them, if there is one."""
    names = set(union(terms))
    return next((term for term in terms if set(term.axes) == names), None)


def conform(term: Term, axes: tuple[str, ...], span: Span) -> Term:
    """The term in the axes asked for, where nothing is left to sum; ``span`` is where they were asked for."""
    for axis in axes:
        if axis not in term.axes:
            raise error(
                "E0205",
                f"the result names axis '{axis}', which the value {term.named()} does not have",
                span,
                f"remove '{axis}' from the result, or use a tensor that has it",
            )
    for axis in term.axes:
        if axis not in axes:
            raise error(
                "E0206",
                f"axis '{axis}' of {term.named()} is missing from the result, but nothing here sums it",
                span,
                f"name '{axis}' in the result, or sum it with 'sum(... over {axis})'",
            )
    return reorder(term, axes)
