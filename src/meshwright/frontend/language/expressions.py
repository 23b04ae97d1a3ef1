"""Gives every expression its axes and its Python; what does not fit is an E02xx error."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

from meshwright.compiler.diagnostics import Span, error
from meshwright.frontend.language import sizes, tree
from meshwright.frontend.language.functions.invocation import check_axis
from meshwright.frontend.language.products import product
from meshwright.frontend.language.sizes import Dimensions
from meshwright.frontend.language.term import Term, align, conform, constant_term, union, widest


class Names(Protocol):
    """Where an expression finds its variables."""

    def lookup(self, name: str, span: Span) -> Term: ...


@dataclass(frozen=True)
class Wanted:
    """The axes that the context asks for. A summand need not have them all (``exact`` False)."""

    axes: tuple[str, ...]
    span: Span
    exact: bool = True


@dataclass(frozen=True)
class Expressions:
    """Evaluates expressions against ``names``; ``call`` evaluates calls, with the axes wanted of them."""

    names: Names
    dimensions: Dimensions
    call: Callable[[tree.Call, Wanted | None], Term]

    def evaluate(self, expression: tree.Expression, wanted: Wanted | None = None) -> Term:
        """The term of an expression, in exactly the wanted axes if ``wanted.exact``."""
        term = self._evaluate(expression, wanted)
        if wanted is not None and wanted.exact:
            return conform(term, wanted.axes, wanted.span)
        return term

    def _evaluate(self, expression: tree.Expression, wanted: Wanted | None) -> Term:
        match expression:
            case tree.Number(value, span) | tree.Text(value, span):
                return constant_term(value, span)
            case tree.Sequence(_, span):
                return constant_term(sizes.constant(expression, self.dimensions.constants), span)
            case tree.Name(name, span):
                return replace(self.names.lookup(name, span), span=span)
            case tree.Paren(inner, span):
                return replace(self.evaluate(inner), span=span)
            case tree.Arrow(value, shape):
                check_shape(shape, self.dimensions)
                return self.evaluate(value, Wanted(shape.names, shape.span))
            case tree.Negative(operand, span):
                term = self._evaluate(operand, wanted)
                self._arithmetic(term, "-")
                if term.is_constant and isinstance(term.constant, int | float):
                    return constant_term(-term.constant, span)
                return replace(term, code=f"(-{term.code})", span=span)
            case tree.Binary("*"):
                return self._product(expression, wanted)
            case tree.Binary():
                return self._binary(expression, wanted)
            case tree.Lookup(table, index, span):
                return self._lookup(self.evaluate(table), self.evaluate(index), span)
            case tree.Call():
                return self.call(expression, wanted)

    def _product(self, expression: tree.Binary, wanted: Wanted | None) -> Term:
        factors: list[Term] = []
        node: tree.Expression = expression
        while isinstance(node, tree.Binary) and node.operator == "*":
            factors.append(self.evaluate(node.right))
            node = node.left
        factors.append(self.evaluate(node))
        factors.reverse()
        for factor in factors:
            self._arithmetic(factor, "*")
        if all(f.is_constant for f in factors):
            value = factors[0]
            for factor in factors[1:]:
                value = self._fold("*", value, factor, expression.span)
            return value
        if wanted is None:
            return product(factors, expression.span, None, None)
        present = union(factors)
        axes = wanted.axes if wanted.exact else tuple(axis for axis in wanted.axes if axis in present)
        return product(factors, expression.span, axes, wanted.span)

    def _binary(self, expression: tree.Binary, wanted: Wanted | None) -> Term:
        """``+ - / **`` element by element, operands aligned by name."""
        operator, span = expression.operator, expression.span
        inner = replace(wanted, exact=False) if wanted is not None and operator in "+-/" else None
        left = self._evaluate(expression.left, inner)
        right = self._evaluate(expression.right, inner if operator in "+-" else None)
        if left.is_constant and right.is_constant:
            return self._fold(operator, left, right, span)
        for term in (left, right):
            self._arithmetic(term, operator)
        if wanted is not None and set(union([left, right])) == set(wanted.axes):
            axes = wanted.axes
        else:
            wide = widest([left, right])
            if wide is None:
                raise error(
                    "E0207",
                    f"neither operand of '{operator}' has every axis of the other: {left.named()} and {right.named()}",
                    span,
                    f"name the result: '... -> [{' '.join(union([left, right]))}]', if you mean to spread both",
                )
            axes = wide.axes
        code = f"({align(left, axes)} {operator} {align(right, axes)})"
        integer = (left.integer or right.integer) and operator in "+-"
        return Term(axes, code, span, integer=integer, weight=left.weight and right.weight)

    def _arithmetic(self, term: Term, operator: str) -> None:
        if term.is_constant and (isinstance(term.constant, bool) or not isinstance(term.constant, int | float)):
            raise error("E0217", f"'{operator}' needs numbers", term.span, "write a number or a tensor")

    def _fold(self, operator: str, left: Term, right: Term, span: Span) -> Term:
        for term in (left, right):
            self._arithmetic(term, operator)
        assert isinstance(left.constant, int | float) and isinstance(right.constant, int | float)
        return constant_term(sizes.arithmetic(operator, left.constant, right.constant, span), span)

    def _lookup(self, table: Term, index: Term, span: Span) -> Term:
        """``table[index]``: the axes of the index, then those of the table after its first."""
        if not index.integer or index.is_constant:
            raise error(
                "E0217",
                "the index of a lookup is not a tensor of integers",
                index.span,
                "use an input declared 'name: int[axes]'",
            )
        if not table.axes:
            raise error(
                "E0217", "only a tensor with axes can be looked up in", table.span, "use a parameter such as E[vocab d]"
            )
        axes = index.axes + table.axes[1:]
        for axis in table.axes:
            if axis in index.axes:
                raise error(
                    "E0216",
                    f"axis '{axis}' is in the table and in the index",
                    span,
                    "give the table other axes than its index",
                )
        if len(table.axes) == 2:
            return Term(axes, f"F.embedding({index.code}, {table.code})", span, integer=table.integer)
        return Term(axes, f"{table.code}[{index.code}]", span, integer=table.integer)


def check_shape(shape: tree.Shape, dimensions: Dimensions) -> None:
    """Every axis declared, none twice."""
    seen: set[str] = set()
    for word in shape.axes:
        check_axis(word, dimensions)
        if word.name in seen:
            raise error(
                "E0216",
                f"axis '{word.name}' stands twice in one tensor",
                word.span,
                "declare a second axis of the same size",
            )
        seen.add(word.name)
