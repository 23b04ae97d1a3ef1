"""The variables that a body may use. A repeated body takes what it needs from around it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from meshwright.compiler.diagnostics import Span, error, nearest, suggestion
from meshwright.frontend.language.sizes import WORDS, Dimensions
from meshwright.frontend.language.term import Term, constant_term, python_name


@dataclass
class Scope:
    """``later`` tells in which line a name will be assigned; ``captured`` what came from ``outer``."""

    dimensions: Dimensions
    functions: tuple[str, ...]
    later: Mapping[str, int] = field(default_factory=dict)
    outer: Scope | None = None
    variables: dict[str, Term] = field(default_factory=dict)
    captured: dict[str, Term] = field(default_factory=dict)

    def has(self, name: str) -> bool:
        return name in self.variables or (self.outer is not None and self.outer.has(name))

    def lookup(self, name: str, span: Span) -> Term:
        """The term of a variable, a size or a word; an error if there is none."""
        if name in self.variables:
            return self.variables[name]
        if self.outer is not None and self.outer.has(name):
            self.captured[name] = self.outer.lookup(name, span)
            self.variables[name] = replace(self.captured[name], code=python_name(name))
            return self.variables[name]
        if name in self.dimensions.constants:
            return constant_term(self.dimensions.constants[name], span)
        if name in WORDS:
            return constant_term(WORDS[name], span)
        raise self._unknown(name, span)

    def _unknown(self, name: str, span: Span) -> Exception:
        if name == self.dimensions.batch:
            return error("E0203", f"the size of the batch axis '{name}' is not known here", span, "use another axis")
        if name in self.later:
            return error(
                "E0212", f"'{name}' is used before line {self.later[name]} defines it", span, "define it first"
            )
        if name in self.functions:
            return error("E0210", f"'{name}' is a function", span, f"call it: '{name}(...)'")
        known = set(self._names()) | set(self.dimensions.constants)
        close = nearest(name, known)
        return error(
            "E0210", f"unknown name '{name}'", span, f"did you mean '{close}'?" if close else suggestion(name, known)
        )

    def _names(self) -> list[str]:
        return list(self.variables) + (self.outer._names() if self.outer else [])
