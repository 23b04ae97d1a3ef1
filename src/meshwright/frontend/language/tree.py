"""The syntax tree of a `.mw` file: frozen dataclasses, each with the place where it was written."""

from __future__ import annotations

from dataclasses import dataclass, field

from meshwright.compiler.diagnostics import Span


@dataclass(frozen=True)
class Word:
    """A name as written, with its place."""

    name: str
    span: Span


@dataclass(frozen=True)
class Shape:
    """``[b t d]``: named axes in order."""

    axes: tuple[Word, ...]
    span: Span

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(word.name for word in self.axes)


@dataclass(frozen=True)
class Number:
    value: int | float
    span: Span


@dataclass(frozen=True)
class Text:
    value: str
    span: Span


@dataclass(frozen=True)
class Name:
    name: str
    span: Span


@dataclass(frozen=True)
class Sequence:
    """``(0.9, 0.95)``, for settings."""

    items: tuple[Expression, ...]
    span: Span


@dataclass(frozen=True)
class Paren:
    inner: Expression
    span: Span


@dataclass(frozen=True)
class Negative:
    operand: Expression
    span: Span


@dataclass(frozen=True)
class Binary:
    """``operator`` is one of ``+ - * / **``."""

    operator: str
    left: Expression
    right: Expression
    span: Span


@dataclass(frozen=True)
class Arrow:
    """``value -> [axes]``: the axes that the result is to have."""

    value: Expression
    shape: Shape
    span: Span


@dataclass(frozen=True)
class Lookup:
    """``table[index]``: rows of a table by integers."""

    table: Expression
    index: Expression
    span: Span


@dataclass(frozen=True)
class Argument:
    """``value``, ``value over axes`` or ``keyword = value``."""

    value: Expression
    span: Span
    over: tuple[Word, ...] = ()
    keyword: Word | None = None


@dataclass(frozen=True)
class Call:
    function: Word
    arguments: tuple[Argument, ...]
    span: Span


Expression = Number | Text | Name | Sequence | Paren | Negative | Binary | Arrow | Lookup | Call


@dataclass(frozen=True)
class Declared:
    """One tensor of a ``param`` line."""

    name: Word
    shape: Shape


@dataclass(frozen=True)
class Param:
    declared: tuple[Declared, ...]
    initial: Expression
    span: Span


@dataclass(frozen=True)
class Assign:
    target: Word
    value: Expression
    span: Span


@dataclass(frozen=True)
class Repeat:
    name: Word
    count: Expression | None
    body: tuple[Statement, ...]
    span: Span


@dataclass(frozen=True)
class Result:
    value: Expression
    span: Span


Statement = Param | Assign | Repeat | Result


@dataclass(frozen=True)
class Input:
    """An input of a function; ``kind`` is ``int``, ``float`` or absent (float)."""

    name: Word
    kind: Word | None
    shape: Shape


@dataclass(frozen=True)
class Function:
    """A ``def`` or, with ``is_model``, the model."""

    name: Word
    inputs: tuple[Input, ...]
    result: Shape
    body: tuple[Statement, ...]
    span: Span
    is_model: bool = False


@dataclass(frozen=True)
class Use:
    """``use package.module: function, other``."""

    module: Word
    names: tuple[Word, ...]
    span: Span


@dataclass(frozen=True)
class Axis:
    """``t: time = 256``; ``role`` is ``batch``, ``time`` or absent."""

    name: Word
    role: Word | None
    size: Expression | None


@dataclass(frozen=True)
class Axes:
    axes: tuple[Axis, ...]
    span: Span


@dataclass(frozen=True)
class Setting:
    """A line of ``train``: its kind (``loss``, ``batch``, ...) and value."""

    kind: str
    span: Span
    value: Expression | None = None
    dtypes: tuple[tuple[Word, Word], ...] = ()


@dataclass(frozen=True)
class Train:
    settings: tuple[Setting, ...]
    span: Span


@dataclass(frozen=True)
class Pin:
    """A line of ``parallel``: its kind, the names it is about, and the mesh axes they go on."""

    kind: str
    span: Span
    subjects: tuple[Word, ...] = ()
    on: tuple[Word, ...] = ()
    values: tuple[Expression, ...] = ()


@dataclass(frozen=True)
class Parallel:
    pins: tuple[Pin, ...]
    span: Span


Section = Use | Axes | Function | Train | Parallel


@dataclass(frozen=True)
class File:
    """A whole file, by section."""

    path: str
    uses: tuple[Use, ...] = ()
    axes: Axes | None = None
    functions: tuple[Function, ...] = field(default=())
    model: Function | None = None
    train: Train | None = None
    parallel: Parallel | None = None
