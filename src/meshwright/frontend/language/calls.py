"""What a call means: a number, a built-in, a function of the file, an imported one, or torch's by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from meshwright.compiler.diagnostics import Span, error, nearest
from meshwright.frontend.language import sizes, tree
from meshwright.frontend.language.expressions import Wanted
from meshwright.frontend.language.functions import builtins
from meshwright.frontend.language.functions.invocation import Invocation, check_arguments
from meshwright.frontend.language.functions.pointwise import KEYWORDS, OPERANDS, pointwise, pointwise_names, refusal
from meshwright.frontend.language.sizes import Dimensions
from meshwright.frontend.language.term import Term, constant_term, reorder

Evaluate = Callable[[tree.Expression], Term]


@dataclass(frozen=True)
class Calls:
    """Resolves calls. ``functions`` are those that may be called here, ``model`` the one that may not
    (or None in the loss, where it may); ``place_child`` gives a called function an attribute of its own."""

    dimensions: Dimensions
    functions: Mapping[str, tree.Function]
    imported: Mapping[str, object]
    model: tree.Function
    in_loss: bool
    place_child: Callable[[tree.Function, Span], str]

    def resolve(self, call: tree.Call, wanted: Wanted | None, evaluate: Evaluate) -> Term:
        name = call.function.name
        known = builtins()
        if name in known:
            found = known[name]
            positional, keywords = check_arguments(call, found.least, found.most, found.keywords)
            return found.make(Invocation(name, call.span, positional, keywords, self.dimensions, evaluate))
        if name == self.model.name.name and self.in_loss:
            return self._function(self.model, "self.predict", call, evaluate)
        if name in self.functions:
            codes = self._function(self.functions[name], "", call, evaluate)
            attribute = self.place_child(self.functions[name], call.function.span)
            return Term(codes.axes, f"self.{attribute}{codes.code}", call.span)
        if name in self.imported:
            return self._imported(call, wanted, evaluate)
        if name in sizes.FUNCTIONS or name in pointwise_names():
            return self._pointwise(call, evaluate)
        raise self._unknown(call)

    def names(self) -> tuple[str, ...]:
        """Every function that may be called by name."""
        return (*builtins(), *self.functions, *self.imported, *pointwise_names(), *sizes.FUNCTIONS)

    def _function(self, function: tree.Function, code: str, call: tree.Call, evaluate: Evaluate) -> Term:
        inputs = function.inputs
        by_name = tuple(i.name.name for i in inputs)
        given = sum(a.keyword is not None for a in call.arguments)
        positional, keywords = check_arguments(call, len(inputs) - given, len(inputs) - given, by_name)
        arguments = dict(zip(by_name, positional, strict=False))
        for key, argument in keywords.items():
            if key in arguments:
                raise error("E0211", f"'{key}' is given twice", argument.span, "remove one of the two")
            arguments[key] = argument
        codes = []
        for declared in inputs:
            argument = arguments[declared.name.name]
            if argument.over:
                word = argument.over[0]
                raise error("E0211", f"'{function.name.name}' takes no 'over'", word.span, f"remove 'over {word.name}'")
            codes.append(_fitting(evaluate(argument.value), declared, function).code)
        return Term(function.result.names, f"{code}({', '.join(codes)})", call.span)

    def _imported(self, call: tree.Call, wanted: Wanted | None, evaluate: Evaluate) -> Term:
        terms, codes = [], []
        for argument in call.arguments:
            term = evaluate(argument.value)
            terms.append(term)
            codes.append(f"{argument.keyword.name}={term.code}" if argument.keyword else term.code)
        tensors = [t for t in terms if t.axes]
        if wanted is None and not tensors:
            raise error(
                "E0207",
                f"the axes of '{call.function.name}' are not known",
                call.span,
                "name its result: '... -> [axes]'",
            )
        axes = wanted.axes if wanted is not None and wanted.exact else tensors[0].axes if tensors else ()
        return Term(axes, f"imported.{call.function.name}({', '.join(codes)})", call.span)

    def _pointwise(self, call: tree.Call, evaluate: Evaluate) -> Term:
        name = call.function.name
        operands = OPERANDS.get(name, 1)
        numeric = name in sizes.FUNCTIONS
        positional, keywords = check_arguments(call, 1, 9 if numeric else operands, KEYWORDS.get(name, ()))
        terms = [evaluate(argument.value) for argument in positional]
        if numeric and all(t.is_constant for t in terms):
            numbers = [t.constant for t in terms if isinstance(t.constant, int | float)]
            return constant_term(sizes.apply(name, numbers, call.span), call.span)
        if name not in pointwise_names():
            raise error(
                "E0217",
                f"'{name}' works on numbers, not tensors",
                call.span,
                f"use 'a{name}(x over axis)' or 'maximum'",
            )
        check_arguments(call, operands, operands, KEYWORDS.get(name, ()))
        for term in terms:
            if term.integer:
                raise error(
                    "E0217",
                    f"'{name}' needs floating numbers, not integers",
                    term.span,
                    "look rows up with 'table[integers]'",
                )
        options = {key: evaluate(argument.value).constant for key, argument in keywords.items()}
        fault = refusal(name, len(terms), dict(options))
        if fault is not None:
            raise error("E0211", f"'{name}' does not accept its arguments: {fault}", call.span, "correct the arguments")
        return pointwise(name, terms, dict(options), call.span)

    def _unknown(self, call: tree.Call) -> Exception:
        name = call.function.name
        if name == self.model.name.name:
            return error(
                "E0210", "the model cannot be called from inside", call.function.span, "move what is shared to a 'def'"
            )
        close = nearest(name, self.names())
        action = f"did you mean '{close}'?" if close else f"define it, or import it: 'use package.module: {name}'"
        return error("E0210", f"unknown function '{name}'", call.function.span, action)


def _fitting(term: Term, declared: tree.Input, function: tree.Function) -> Term:
    """The argument in the order of dims that the function declares."""
    wants_integers = declared.kind is not None and declared.kind.name == "int"
    if term.integer != wants_integers and not (term.is_constant and not wants_integers):
        wanted, found = ("integers", "floating numbers") if wants_integers else ("floating numbers", "integers")
        raise error(
            "E0217",
            f"'{declared.name.name}' of '{function.name.name}' takes {wanted}, not {found}",
            term.span,
            "look rows up first with 'table[integers]'"
            if not wants_integers
            else "pass an input declared as 'int[axes]'",
        )
    axes = declared.shape.names
    if term.is_constant and not isinstance(term.constant, int | float):
        raise error("E0217", f"'{declared.name.name}' takes a tensor", term.span, "pass a tensor")
    if set(term.axes) != set(axes):
        missing = [axis for axis in axes if axis not in term.axes]
        surplus = [axis for axis in term.axes if axis not in axes]
        what = f"lacks '{missing[0]}'" if missing else f"has '{surplus[0]}' too many"
        raise error(
            "E0208",
            f"'{function.name.name}' takes {declared.name.name}[{' '.join(axes)}], but {term.named()} {what}",
            term.span,
            f"pass a tensor with the axes [{' '.join(axes)}]",
        )
    return reorder(term, axes)
