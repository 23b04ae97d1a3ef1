"""Sizes and constants: evaluates the expressions of `axes`, `repeat` and settings to plain values."""

from __future__ import annotations

import math
import operator as operator_module
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from meshwright.compiler.diagnostics import Span, error, suggestion
from meshwright.frontend.language import tree

Constant = int | float | str | bool | None | tuple["Constant", ...]

FUNCTIONS: dict[str, Callable[..., float]] = {
    "sqrt": math.sqrt,
    "log": math.log,
    "exp": math.exp,
    "min": min,
    "max": max,
    "floor": math.floor,
    "ceil": math.ceil,
    "round": round,
}
LARGEST = 2.0**100
"""No number in a file may be larger than this in size, so that arithmetic always ends well."""

_OPERATORS: dict[str, Callable[[float, float], float]] = {
    "+": operator_module.add,
    "-": operator_module.sub,
    "*": operator_module.mul,
    "/": operator_module.truediv,
    "**": operator_module.pow,
}
WORDS: dict[str, Constant] = {"true": True, "false": False, "none": None, "True": True, "False": False, "None": None}


@dataclass(frozen=True)
class Dimensions:
    """The axes of a file: sizes (the batch axis has none), roles, and the named counts of `repeat`."""

    sizes: dict[str, int]
    counts: dict[str, int]
    batch: str
    time: str | None
    words: dict[str, tree.Word]

    @property
    def axes(self) -> tuple[str, ...]:
        return tuple(self.words)

    @property
    def constants(self) -> dict[str, int]:
        """Everything that an expression may use as a number."""
        return {**self.sizes, **self.counts}


def arithmetic(operator: str, left: float, right: float, span: Span) -> float:
    """``left operator right``; integers stay integers where the result is whole."""
    try:
        if operator == "**":
            float(left) ** float(right)  # finds what is too large before the exact power does
        value = _OPERATORS[operator](left, right)
    except (ZeroDivisionError, OverflowError) as fault:
        raise error("E0203", f"this has no value: {fault}", span, "correct the numbers") from None
    if isinstance(value, complex) or not abs(value) <= LARGEST:
        raise error("E0203", "this is no number that can be used", span, "correct the numbers")
    if operator == "/" and isinstance(left, int) and isinstance(right, int) and left % right == 0:
        return left // right
    return value


def apply(function: str, arguments: list[float], span: Span) -> float:
    """``function(arguments)`` of :data:`FUNCTIONS`."""
    try:
        value = FUNCTIONS[function](*arguments)
    except (TypeError, ValueError, OverflowError) as fault:
        raise error("E0203", f"'{function}' has no value here: {fault}", span, "correct its arguments") from None
    if not abs(value) <= LARGEST:
        raise error("E0203", f"'{function}' gives no number that can be used here", span, "correct its arguments")
    return value


def number(expression: tree.Expression, known: Mapping[str, float]) -> float:
    """The number that an expression over ``known`` names stands for."""
    match expression:
        case tree.Number(value):
            return value
        case tree.Paren(inner):
            return number(inner, known)
        case tree.Negative(operand):
            return -number(operand, known)
        case tree.Binary(operator, left, right, span):
            return arithmetic(operator, number(left, known), number(right, known), span)
        case tree.Name(name, span):
            if name not in known:
                raise error("E0210", f"unknown name '{name}'", span, suggestion(name, known))
            return known[name]
        case tree.Call(function, arguments, span):
            if function.name not in FUNCTIONS:
                raise error(
                    "E0210",
                    f"'{function.name}' is no function of numbers",
                    function.span,
                    suggestion(function.name, FUNCTIONS),
                )
            return apply(function.name, [number(a.value, known) for a in arguments], span)
    raise error("E0203", "a number is expected here", expression.span, "write a number or an expression of sizes")


def constant(expression: tree.Expression, known: Mapping[str, float]) -> Constant:
    """Like :func:`number`, but texts, tuples, ``true``, ``false`` and ``none`` may stand there too."""
    match expression:
        case tree.Text(value):
            return value
        case tree.Sequence(items):
            return tuple(constant(item, known) for item in items)
        case tree.Name(name) if name in WORDS and name not in known:
            return WORDS[name]
    return number(expression, known)


def positive(expression: tree.Expression, known: Mapping[str, float], what: str) -> int:
    """A whole number above zero."""
    value = number(expression, known)
    if value != int(value) or not 1 <= value < 2**31:
        action = "make it smaller" if value >= 2**31 else "make it a whole number above zero"
        raise error("E0203", f"{what} is {value:g}", expression.span, action)
    return int(value)


def repeats(body: tuple[tree.Statement, ...]) -> Iterator[tree.Repeat]:
    """Every ``repeat`` of a body, nested ones too."""
    for statement in body:
        if isinstance(statement, tree.Repeat):
            yield statement
            yield from repeats(statement.body)


def dimensions(file: tree.File, overrides: Mapping[str, float]) -> Dimensions:
    """Resolve all sizes of a file; ``overrides`` replace sizes and counts by name."""
    words: dict[str, tree.Word] = {}
    roles: dict[str, tree.Word] = {}
    known: dict[str, float] = {}
    assert file.axes is not None and file.model is not None
    for axis in file.axes.axes:
        name, span = axis.name.name, axis.name.span
        if name in words:
            line = words[name].span.line
            raise error("E0202", f"axis '{name}' is declared twice", span, f"keep this one or the one in line {line}")
        words[name] = axis.name
        if axis.role is not None:
            _role(axis, axis.role, roles)
        if axis.role is not None and axis.role.name == "batch":
            if axis.size is not None:
                place = axis.size.span
                raise error(
                    "E0204", f"the batch axis '{name}' is given a size", place, "say it as 'batch N' in 'train'"
                )
            continue
        if name in overrides:
            known[name] = overrides[name]
            continue
        if axis.size is None:
            raise error("E0203", f"axis '{name}' has no size", span, f"write '{name} = N'")
        _not_before(axis.size, file.axes, words)
        known[name] = positive(axis.size, known, f"the size of axis '{name}'")
    if "batch" not in roles:
        raise error("E0204", "no axis is the batch", file.axes.span, "declare one, such as 'b: batch'")
    counts: dict[str, float] = {}
    for body in [f.body for f in file.functions] + [file.model.body]:
        for repeat in repeats(body):
            _count(repeat, words, known, counts, overrides)
    sizes = {name: int(value) for name, value in known.items()}
    time = next((name for name, role in _roles(file.axes) if role == "time"), None)
    batch = next(name for name, role in _roles(file.axes) if role == "batch")
    return Dimensions(sizes, {k: int(v) for k, v in counts.items()}, batch, time, words)


def _roles(axes: tree.Axes) -> Iterator[tuple[str, str]]:
    for axis in axes.axes:
        if axis.role is not None:
            yield axis.name.name, axis.role.name


def _role(axis: tree.Axis, role: tree.Word, roles: dict[str, tree.Word]) -> None:
    if role.name not in ("batch", "time"):
        raise error("E0204", f"unknown role '{role.name}'", role.span, suggestion(role.name, ("batch", "time")))
    if role.name in roles:
        first = roles[role.name]
        raise error(
            "E0204", f"'{axis.name.name}' is a second {role.name} axis", role.span, f"keep '{first.name}' alone"
        )
    roles[role.name] = axis.name


def _not_before(size: tree.Expression, axes: tree.Axes, words: Mapping[str, tree.Word]) -> None:
    """A size may use the axes above it only."""
    later = {axis.name.name: axis.name.span.line for axis in axes.axes if axis.name.name not in words}
    for name in _names(size):
        if name.name in later:
            raise error(
                "E0212",
                f"'{name.name}' is used before it is declared",
                name.span,
                f"move it up from line {later[name.name]}",
            )


def _names(expression: tree.Expression) -> Iterator[tree.Name]:
    match expression:
        case tree.Name():
            yield expression
        case tree.Paren(inner) | tree.Negative(inner):
            yield from _names(inner)
        case tree.Binary(_, left, right):
            yield from _names(left)
            yield from _names(right)
        case tree.Call(_, arguments):
            for argument in arguments:
                yield from _names(argument.value)


def _count(
    repeat: tree.Repeat,
    words: Mapping[str, tree.Word],
    known: Mapping[str, float],
    counts: dict[str, float],
    overrides: Mapping[str, float],
) -> None:
    name = repeat.name.name
    if repeat.count is None:
        if name not in known:
            raise error("E0203", f"'repeat {name}' has no count", repeat.name.span, f"write 'repeat {name} = N'")
        return
    if name in words or name in counts:
        raise error("E0213", f"'{name}' is in use already", repeat.name.span, "give this repeat a name of its own")
    counts[name] = overrides.get(name) or positive(repeat.count, {**known, **counts}, f"the count of '{name}'")
