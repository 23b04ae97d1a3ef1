"""One line of a graph's text: its tokens, and the values that stand in arguments."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from meshwright.compiler.diagnostics import MeshwrightError, Span, error, suggestion
from meshwright.compiler.graph.dtypes import dtype_named
from meshwright.compiler.graph.functions import COLLECTIVES, function_named
from meshwright.compiler.mesh import Sharding, parse_sharding

CODE = "E0150"
_TOKEN = re.compile(
    r"\s*(?:(?P<node>%[A-Za-z_]\w*)|(?P<string>\"(?:\\.|[^\"\\])*\"|'(?:\\.|[^'\\])*')"
    r"|(?P<number>-?(?:\d[\d_]*\.?\d*(?:e[+-]?\d+)?|inf\b|nan\b))|(?P<name>[A-Za-z_][\w.]*)"
    r"|(?P<comment>\#.*)|(?P<mark>[^\s]))"
)
_SHARDING = re.compile(r"\s*(\[[^\]]*\](?:\s*\+\w+(?::\w+)?)*)")
_MADE: dict[str, Callable[..., Any]] = {
    "slice": slice,
    "complex": complex,
    "device": torch.device,
}
_WORDS: dict[str, object] = {"None": None, "True": True, "False": False, "inf": float("inf"), "nan": float("nan")}


@dataclass
class Line:
    """Reads a line from left to right; ``at`` is where the next token begins.

    ``nodes`` are those defined above.
    """

    file: str
    line: str
    number: int
    nodes: Mapping[str, fx.Node]
    at: int = 0
    kind: str = ""
    token: str = ""
    start: int = 0

    @property
    def rest(self) -> str:
        """What follows the current token."""
        return self.line[self.at :].lstrip()

    def fault(self, message: str, action: str = "see the textual form in compiler/graph/text.py") -> MeshwrightError:
        column = min(self.start, len(self.line)) + 1
        return error(CODE, message, Span(self.file, self.number, column, max(1, len(self.token)), self.line), action)

    def advance(self) -> str:
        """Step to the next token and return the one before it."""
        passed = self.token
        found = _TOKEN.match(self.line, self.at)
        if found is None:
            self.kind, self.token, self.start = "end", "", len(self.line)
            return passed
        self.kind = found.lastgroup or ""
        self.token = found[self.kind]
        self.start, self.at = found.start(self.kind), found.end()
        if self.kind == "name" and self.token in ("inf", "nan"):
            self.kind = "number"
        return passed

    def expect(self, mark: str) -> None:
        if self.token != mark:
            raise self.fault(f"expected '{mark}'" + (f", found '{self.token}'" if self.token else ""))
        self.advance()

    def end(self) -> str:
        if self.kind not in ("comment", "end"):
            raise self.fault(f"expected the end of the line, found '{self.token}'")
        return self.token if self.kind == "comment" else ""

    def sharding(self) -> Sharding:
        """The sharding that follows the current token."""
        found = _SHARDING.match(self.line, self.at)
        if not found:
            self.advance()
            raise self.fault("expected a shape or sharding in brackets")
        self.start, self.token = found.start(1), found[1]
        try:
            result = parse_sharding(found[1])
        except ValueError as fault:
            raise self.fault(str(fault)) from None
        self.at = found.end()
        self.advance()
        return result

    def value(self) -> Any:
        """One argument: a node, a literal, a list, a tuple, a dict, a dtype, a device."""
        if self.kind == "node":
            name = self.token[1:]
            if name not in self.nodes:
                raise self.fault(f"%{name} is not defined above", suggestion(name, self.nodes))
            self.advance()
            return self.nodes[name]
        if self.kind == "string":
            return ast.literal_eval(self.advance())
        if self.kind == "number":
            text = self.advance()
            return float(text) if re.search(r"[.en]", text) else int(text)
        if self.kind == "name":
            return self.word()
        if self.token == "[":
            return self.items("]")[0]
        if self.token == "(":
            items, commas = self.items(")")
            return tuple(items) if commas or not items else items[0]
        if self.token == "{":
            return self.mapping()
        raise self.fault(f"expected a value, found '{self.token}'" if self.token else "expected a value")

    def items(self, close: str) -> tuple[list[Any], int]:
        result: list[Any] = []
        commas = 0
        self.advance()
        while self.token != close:
            result.append(self.value())
            if self.token != close:
                self.expect(",")
                commas += 1
        self.advance()
        return result, commas

    def mapping(self) -> dict[Any, Any]:
        result = {}
        self.advance()
        while self.token != "}":
            key = self.value()
            self.expect(":")
            result[key] = self.value()
            if self.token != "}":
                self.expect(",")
        self.advance()
        return result

    def word(self) -> Any:
        word = self.token
        if word in _WORDS:
            self.advance()
            return _WORDS[word]
        if word in _MADE:
            self.advance()
            parts = self.items(")")[0]
            try:
                return _MADE[word](*parts)
            except (TypeError, ValueError, RuntimeError):
                raise self.fault(f"'{word}' does not take these arguments") from None
        found = getattr(torch, word.removeprefix("torch."), None) if word.startswith("torch.") else None
        if not isinstance(found, (torch.layout, torch.memory_format)):
            try:
                found = dtype_named(word)
            except KeyError:
                raise self.fault(f"unknown word '{word}'") from None
        self.advance()
        return found

    def function(self) -> Any:
        try:
            target = function_named(self.token)
        except KeyError:
            raise self.fault(f"unknown op '{self.token}'", suggestion(self.token, COLLECTIVES)) from None
        self.advance()
        return target

    def arguments(self) -> tuple[list[Any], dict[str, Any]]:
        args: list[Any] = []
        kwargs: dict[str, Any] = {}
        self.expect("(")
        while self.token != ")":
            if self.kind == "name" and self.rest[:1] == "=":
                key = self.advance()
                self.advance()
                kwargs[key] = self.value()
            else:
                args.append(self.value())
            if self.token != ")":
                self.expect(",")
        self.advance()
        return args, kwargs
