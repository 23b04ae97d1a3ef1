"""Checks the statements of a function or repeated body and collects what its module will need."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from meshwright.compiler.diagnostics import Span, error
from meshwright.frontend.language import sizes, tree
from meshwright.frontend.language.block import Block, Child, Parameter
from meshwright.frontend.language.calls import Calls
from meshwright.frontend.language.expressions import Expressions, Wanted, check_shape
from meshwright.frontend.language.initial import initial
from meshwright.frontend.language.scope import Scope
from meshwright.frontend.language.sizes import Dimensions
from meshwright.frontend.language.term import Term, attribute_fault, conform, python_name


@dataclass(frozen=True)
class Library:
    """What the bodies of a file share."""

    dimensions: Dimensions
    functions: Mapping[str, tree.Function]
    imported: Mapping[str, object]
    model: tree.Function


@dataclass
class Body:
    """A body under check. ``calls`` are functions it calls, by attribute; ``repeats`` its inner bodies."""

    library: Library
    name: str
    line: int
    scope: Scope
    in_loss: bool = False
    inputs: tuple[str, ...] = ()
    parameters: list[Parameter] = field(default_factory=list)
    calls: dict[str, tuple[tree.Function, Span]] = field(default_factory=dict)
    repeats: dict[str, tuple[Body, int]] = field(default_factory=dict)
    lines: list[tuple[int, str]] = field(default_factory=list)
    fixed: set[str] = field(default_factory=set)
    """Names of parameters, which nothing may assign."""

    @property
    def expressions(self) -> Expressions:
        calls = Calls(
            self.library.dimensions,
            self.library.functions,
            self.library.imported,
            self.library.model,
            self.in_loss,
            self._place_child,
        )
        return Expressions(
            self.scope, self.library.dimensions, lambda c, w: calls.resolve(c, w, self.expressions.evaluate)
        )

    def statements(self, body: tuple[tree.Statement, ...]) -> None:
        for statement in body:
            match statement:
                case tree.Param():
                    self._param(statement)
                case tree.Assign():
                    self._assign(statement)
                case tree.Repeat():
                    self._repeat(statement)
                case tree.Result(_, span):
                    raise error("E0215", "nothing uses this value", span, "give it a name, or make it the last line")

    def result(self, value: tree.Expression, shape: tree.Shape) -> None:
        """The last line of a function: its value in the axes that the header declares."""
        wanted = Wanted(shape.names, value.span)
        if isinstance(value, tree.Arrow):
            term = conform(self.expressions.evaluate(value), shape.names, value.shape.span)
        else:
            term = self.expressions.evaluate(value, wanted)
        if term.integer:
            raise error("E0217", "the result is a tensor of integers", value.span, "return floating numbers")
        self.lines.append((value.span.line, f"return {term.code}"))

    def block(self, function: Callable[[tree.Function, Span], Block]) -> Block:
        """The finished block; ``function`` gives the blocks of called functions."""
        children = [Child(attribute, function(*called)) for attribute, called in self.calls.items()]
        children += [Child(name, body.block(function), count) for name, (body, count) in self.repeats.items()]
        return Block(self.name, self.line, self.inputs, tuple(self.parameters), tuple(children), tuple(self.lines))

    def free(self, word: tree.Word) -> None:
        """``word`` must not stand for something else already."""
        name = word.name
        if name in self.library.dimensions.words:
            line = self.library.dimensions.words[name].span.line
            raise error("E0202", f"'{name}' shadows the axis of line {line}", word.span, "choose another name")
        if name in self.library.dimensions.counts or name in sizes.WORDS:
            raise error("E0213", f"'{name}' is in use already", word.span, "choose another name")
        if name in self.function_names():
            raise error("E0213", f"'{name}' is the name of a function", word.span, "choose another name")

    def function_names(self) -> tuple[str, ...]:
        return (*self.library.functions, *self.library.imported, self.library.model.name.name)

    def _param(self, statement: tree.Param) -> None:
        first = initial(statement.initial, self.library.dimensions)
        for declared in statement.declared:
            name, shape = declared.name, declared.shape
            self.free(name)
            check_shape(shape, self.library.dimensions)
            if self.scope.has(name.name):
                raise error("E0213", f"'{name.name}' is defined already", name.span, "choose another name")
            fault = attribute_fault(name.name)
            if fault is not None:
                raise error("E0213", fault, name.span, "choose another name")
            for word in shape.axes:
                if word.name == self.library.dimensions.batch:
                    raise error(
                        "E0222",
                        f"parameter '{name.name}' has the batch axis",
                        word.span,
                        "leave it out: weights know no batch",
                    )
            sizes_ = tuple(self.library.dimensions.sizes[axis] for axis in shape.names)
            if math.prod(sizes_) > 2**62:
                raise error("E0203", f"parameter '{name.name}' is too large", shape.span, "make its axes smaller")
            self.parameters.append(Parameter(name.name, shape.names, sizes_, first, name.span))
            self.scope.variables[name.name] = Term(shape.names, f"self.{name.name}", name.span, weight=True)
            self.fixed.add(name.name)

    def _assign(self, statement: tree.Assign) -> None:
        self.free(statement.target)
        name = statement.target.name
        self._check_not_fixed(statement.target)
        term = self.expressions.evaluate(statement.value)
        code = python_name(name)
        self.lines.append((statement.span.line, f"{code} = {term.code}"))
        if not term.is_constant:
            term = replace(term, code=code)
        self.scope.variables[name] = term

    def _check_not_fixed(self, word: tree.Word) -> None:
        if word.name in self.fixed:
            raise error(
                "E0213", f"'{word.name}' is a parameter and cannot be assigned", word.span, "choose another name"
            )

    def _repeat(self, statement: tree.Repeat) -> None:
        name = statement.name.name
        taken = name in self.repeats or self.scope.has(name) or name in self.function_names()
        fault = f"'{name}' is in use already" if taken else attribute_fault(name)
        if fault is not None:
            raise error("E0213", fault, statement.name.span, "give this repeat a name of its own")
        count = self.library.dimensions.constants[name]
        scope = Scope(self.library.dimensions, self.scope.functions, assigned(statement.body), self.scope)
        inner = Body(
            self.library, f"{self.name}_{name}", statement.span.line, scope, self.in_loss, fixed=set(self.fixed)
        )
        carried = [n for n in assigned(statement.body) if self.scope.has(n) and n not in self.fixed]
        before = {n: scope.lookup(n, statement.span) for n in carried}
        for variable in carried:  # its value changes from round to round
            scope.variables[variable] = _changing(before[variable], python_name(variable))
        inner.statements(statement.body)
        if not carried:
            raise error(
                "E0214",
                f"'repeat {name}' changes nothing outside it",
                statement.span,
                "assign a variable defined before it",
            )
        for variable in carried:
            after = scope.variables[variable]
            if set(after.axes) != set(before[variable].axes):
                raise error(
                    "E0214",
                    f"'{variable}' enters the repeat as {before[variable].named()} and leaves it as {after.named()}",
                    after.span,
                    f"give it the axes {before[variable].named()} again",
                )
        inner.inputs = tuple(python_name(n) for n in scope.captured)
        results = [conform(scope.variables[n], before[n].axes, statement.span).code for n in carried]
        inner.lines.append((statement.span.line, f"return {', '.join(results)}"))
        self.repeats[name] = (inner, count)
        targets = ", ".join(python_name(n) for n in carried)
        codes = [python_name(n) if n in carried else term.code for n, term in scope.captured.items()]
        arguments = ", ".join(codes)
        self.lines.append((statement.span.line, f"for block in self.{name}: {targets} = block({arguments})"))
        for variable in carried:
            self.scope.variables[variable] = _changing(before[variable], python_name(variable))

    def _place_child(self, function: tree.Function, span: Span) -> str:
        """An attribute for one more call of ``function``: its name, then with _2, _3, ..."""
        taken = {*self.calls, *self.repeats, *(p.name for p in self.parameters)}
        base = function.name.name
        name, number = base, 1
        while name in taken or attribute_fault(name) is not None:
            number += 1
            name = f"{base}_{number}"
        self.calls[name] = (function, span)
        return name


def _changing(term: Term, code: str) -> Term:
    """A variable whose value is known only when the program runs."""
    return replace(term, code=code, weight=False, is_constant=False, constant=None)


def assigned(body: tuple[tree.Statement, ...]) -> dict[str, int]:
    """The names that a body assigns, with the line of the first time."""
    names: dict[str, int] = {}
    for statement in body:
        match statement:
            case tree.Assign(target):
                names.setdefault(target.name, statement.span.line)
            case tree.Param(declared):
                for one in declared:
                    names.setdefault(one.name.name, statement.span.line)
            case tree.Repeat(_, _, inner):
                for name, line in assigned(inner).items():
                    names.setdefault(name, line)
    return names
