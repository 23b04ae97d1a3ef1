"""A call as a built-in sees it: its arguments checked for number and keywords, evaluated when asked for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from meshwright.compiler.diagnostics import Span, error, nearest, suggestion
from meshwright.frontend.language import tree
from meshwright.frontend.language.sizes import Constant, Dimensions
from meshwright.frontend.language.term import Term


@dataclass(frozen=True)
class Invocation:
    """``evaluate`` turns an argument into a term; shapes and sizes come from ``dimensions``."""

    name: str
    span: Span
    positional: tuple[tree.Argument, ...]
    keywords: dict[str, tree.Argument]
    dimensions: Dimensions
    evaluate: Callable[[tree.Expression], Term]

    def term(self, index: int) -> Term:
        return self.evaluate(self.positional[index].value)

    def tensor(self, index: int) -> Term:
        """A positional argument that must be a tensor of floating numbers."""
        return self._floating(self.positional[index])

    def integers(self, index: int) -> Term:
        """A positional argument that must be a tensor of integers."""
        term = self.term(index)
        if not term.integer:
            raise error(
                "E0217", f"'{self.name}' needs integers here", term.span, "pass an input declared as 'name: int[axes]'"
            )
        return term

    def _floating(self, argument: tree.Argument) -> Term:
        term = self.evaluate(argument.value)
        if term.is_constant or not term.axes:
            raise error("E0217", f"'{self.name}' needs a tensor here", argument.span, "pass a tensor with axes")
        if term.integer:
            raise error(
                "E0217",
                f"'{self.name}' needs floating numbers, not integers",
                argument.span,
                "look rows up first with 'table[integers]'",
            )
        return term

    def over(self, index: int, term: Term, example: str) -> tuple[str, ...]:
        """The axes that follow ``over`` in a positional argument, each an axis of ``term``."""
        argument = self.positional[index]
        if not argument.over:
            raise error("E0211", f"'{self.name}' needs to know the axis", argument.span, f"write '{example}'")
        names = [word.name for word in argument.over]
        for position, word in enumerate(argument.over):
            check_axis(word, self.dimensions)
            if word.name in names[:position]:
                raise error("E0216", f"axis '{word.name}' stands twice after 'over'", word.span, "name it once")
            if word.name not in term.axes:
                raise error(
                    "E0208",
                    f"the argument {term.named()} has no axis '{word.name}'",
                    word.span,
                    suggestion(word.name, term.axes) or "pass a tensor with that axis",
                )
        return tuple(names)

    def axis(self, index: int, term: Term, example: str) -> str:
        """The one axis that follows ``over``."""
        names = self.over(index, term, example)
        if len(names) > 1:
            raise error(
                "E0211", f"'{self.name}' works over one axis", self.positional[index].over[1].span, f"write '{example}'"
            )
        return names[0]

    def no_over(self, *indices: int) -> None:
        for index in indices:
            if index < len(self.positional) and self.positional[index].over:
                word = self.positional[index].over[0]
                raise error("E0211", f"'{self.name}' takes no 'over' here", word.span, f"remove 'over {word.name}'")

    def constant(self, keyword: str, default: Constant) -> Constant:
        """The value of a keyword that must be known in the file."""
        if keyword not in self.keywords:
            return default
        argument = self.keywords[keyword]
        term = self.evaluate(argument.value)
        if not term.is_constant:
            raise error("E0211", f"'{keyword}' must be a plain value", argument.span, "write a number")
        return term.constant

    def floating(self, keyword: str, default: float) -> float:
        value = self.constant(keyword, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise error("E0211", f"'{keyword}' must be a number", self.keywords[keyword].span, "write a number")
        return float(value)

    def tensor_keyword(self, keyword: str) -> Term | None:
        return self._floating(self.keywords[keyword]) if keyword in self.keywords else None


@dataclass(frozen=True)
class Builtin:
    """A built-in: how many positional arguments and which keywords it takes, and what it makes of them."""

    name: str
    least: int
    most: int
    keywords: tuple[str, ...]
    make: Callable[[Invocation], Term]


def builtin(
    name: str, least: int, most: int | None = None, keywords: tuple[str, ...] = ()
) -> Callable[[Callable[[Invocation], Term]], Builtin]:
    """Declare the function below as the built-in ``name``."""
    return lambda make: Builtin(name, least, least if most is None else most, keywords, make)


def check_axis(word: tree.Word, dimensions: Dimensions) -> None:
    """``word`` must be a declared axis."""
    if word.name not in dimensions.words:
        close = nearest(word.name, dimensions.axes)
        action = f"did you mean '{close}'?" if close else f"declare '{word.name}' in 'axes'"
        raise error("E0201", f"unknown axis '{word.name}'", word.span, action)


def check_arguments(
    call: tree.Call, least: int, most: int, keywords: tuple[str, ...]
) -> tuple[tuple[tree.Argument, ...], dict[str, tree.Argument]]:
    """Split the arguments of a call into positional and keyword ones; their number and names must fit."""
    positional = tuple(a for a in call.arguments if a.keyword is None)
    named: dict[str, tree.Argument] = {}
    for argument in call.arguments:
        if argument.keyword is None:
            if named:
                raise error(
                    "E0211",
                    "a positional argument after a keyword one",
                    argument.span,
                    "move it before the keyword arguments",
                )
            continue
        name = argument.keyword.name
        if name not in keywords:
            action = suggestion(name, keywords) or f"'{call.function.name}' takes no keyword arguments; remove it"
            raise error("E0211", f"'{call.function.name}' has no argument '{name}'", argument.keyword.span, action)
        if name in named:
            raise error("E0211", f"'{name}' is given twice", argument.keyword.span, "remove one of the two")
        named[name] = argument
    if not least <= len(positional) <= most:
        wanted = str(least) if least == most else f"{least} to {most}"
        raise error(
            "E0211",
            f"'{call.function.name}' takes {wanted} argument{'s' if wanted != '1' else ''}, not {len(positional)}",
            call.span,
            "remove the surplus" if len(positional) > most else "add what is missing",
        )
    return positional, named
