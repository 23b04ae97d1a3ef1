"""Checks a whole file and turns it into blocks. All that is wrong in its functions is told at once."""

from __future__ import annotations

import keyword
from collections.abc import Mapping
from dataclasses import dataclass

from meshwright.compiler.diagnostics import Diagnostic, MeshwrightError, Span, error, suggestion
from meshwright.frontend.language import tree
from meshwright.frontend.language.block import Block
from meshwright.frontend.language.bodies import Body, Library, assigned
from meshwright.frontend.language.expressions import check_shape
from meshwright.frontend.language.functions import builtins
from meshwright.frontend.language.functions.pointwise import pointwise_names
from meshwright.frontend.language.scope import Scope
from meshwright.frontend.language.sizes import FUNCTIONS, Dimensions
from meshwright.frontend.language.term import Term, attribute_fault, python_name


@dataclass(frozen=True)
class Checked:
    """The model as a block; the loss as the lines of a second forward over the same parameters."""

    model: Block
    loss: Block | None
    inputs: tuple[tree.Input, ...]


def check(file: tree.File, dimensions: Dimensions, imported: Mapping[str, object]) -> Checked:
    """Check every function, the model and the loss. Raises one error that holds all findings."""
    assert file.model is not None
    functions: dict[str, tree.Function] = {}
    for function in file.functions:
        _check_name(function.name, functions, dimensions, imported)
        functions[function.name.name] = function
    _check_name(file.model.name, functions, dimensions, imported)
    library = Library(dimensions, functions, imported, file.model)
    findings: list[Diagnostic] = []
    bodies: dict[str, Body] = {}
    for function in (*file.functions, file.model):
        try:
            bodies[function.name.name] = _function(function, library)
        except MeshwrightError as fault:
            findings.extend(fault.diagnostics)
    loss = None
    try:
        loss = _loss(file, library)
    except MeshwrightError as fault:
        findings.extend(fault.diagnostics)
    if findings:
        raise MeshwrightError(*findings)
    blocks = _Blocks(bodies)
    model = bodies[file.model.name.name].block(blocks.of)
    return Checked(model, loss.block(blocks.of) if loss else None, file.model.inputs)


class _Blocks:
    """Finished blocks by function; refuses functions that call themselves."""

    def __init__(self, bodies: Mapping[str, Body]) -> None:
        self._bodies = bodies
        self._done: dict[str, Block] = {}
        self._open: list[str] = []

    def of(self, function: tree.Function, span: Span) -> Block:
        name = function.name.name
        if name in self._open:
            raise error("E0223", f"'{name}' calls itself", span, "use 'repeat' to apply something several times")
        if name not in self._done:
            self._open.append(name)
            self._done[name] = self._bodies[name].block(self.of)
            self._open.pop()
        return self._done[name]


def _check_name(
    word: tree.Word, functions: Mapping[str, tree.Function], dimensions: Dimensions, imported: Mapping[str, object]
) -> None:
    name = word.name
    if name in functions:
        line = functions[name].name.span.line
        raise error("E0213", f"'{name}' is defined in line {line} already", word.span, "choose another name")
    if name in builtins() or name in pointwise_names() or name in FUNCTIONS:
        raise error("E0213", f"'{name}' is a built-in function", word.span, "choose another name")
    fault = attribute_fault(name) if keyword.iskeyword(name) else None
    if fault is not None:
        raise error("E0213", fault, word.span, "choose another name")
    if name in imported:
        raise error("E0213", f"'{name}' is imported already", word.span, "choose another name")
    if name in dimensions.constants or name == dimensions.batch:
        raise error("E0202", f"'{name}' shadows the axis of the same name", word.span, "choose another name")


def _function(function: tree.Function, library: Library) -> Body:
    check_shape(function.result, library.dimensions)
    scope = Scope(library.dimensions, tuple(library.functions), assigned(function.body))
    body = Body(library, function.name.name, function.span.line, scope)
    body.inputs = _inputs(function.inputs, body)
    *before, last = function.body
    if not isinstance(last, tree.Result):
        place = function.name.span
        raise error(
            "E0215", f"'{function.name.name}' has no result", place, "end it with the expression that is its value"
        )
    body.statements(tuple(before))
    body.result(last.value, function.result)
    return body


def _inputs(inputs: tuple[tree.Input, ...], body: Body) -> tuple[str, ...]:
    """Declare the inputs of a function as variables of its body."""
    for one in inputs:
        body.free(one.name)
        check_shape(one.shape, body.library.dimensions)
        if one.kind is not None and one.kind.name not in ("int", "float"):
            raise error(
                "E0210", f"unknown type '{one.kind.name}'", one.kind.span, suggestion(one.kind.name, ("int", "float"))
            )
        name = one.name.name
        if name in body.scope.variables:
            raise error("E0213", f"input '{name}' is declared twice", one.name.span, "choose another name")
        integer = one.kind is not None and one.kind.name == "int"
        body.scope.variables[name] = Term(one.shape.names, python_name(name), one.name.span, integer=integer)
    return tuple(python_name(one.name.name) for one in inputs)


def _loss(file: tree.File, library: Library) -> Body | None:
    """The loss as a body whose inputs are the model's and which may call the model."""
    setting = next((s for s in file.train.settings if s.kind == "loss"), None) if file.train else None
    if setting is None or setting.value is None:
        return None
    model = library.model
    scope = Scope(library.dimensions, (*library.functions, model.name.name), {})
    body = Body(library, "loss", setting.span.line, scope, in_loss=True)
    body.inputs = _inputs(model.inputs, body)
    term = body.expressions.evaluate(setting.value)
    if term.axes:
        raise error(
            "E0206",
            f"the loss is not one number, it has the axes {term.named()}",
            setting.value.span,
            f"reduce it: 'mean(... over {' '.join(term.axes)})'",
        )
    if term.is_constant:
        raise error("E0219", "the loss is a fixed number", setting.value.span, "compute it from the model")
    if body.calls:
        name, (_, span) = next(iter(body.calls.items()))
        raise error(
            "E0215", f"the loss calls '{name}'", span, "call it in the model; the loss may use the model and built-ins"
        )
    body.lines.append((setting.value.span.line, f"return {term.code}"))
    return body
