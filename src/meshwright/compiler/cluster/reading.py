"""Reads entries of TOML tables as quantities, numbers and names, and gathers every fault with its line."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from meshwright.compiler.cluster.units import BASE, EXAMPLES, Quantity, parse_quantity
from meshwright.compiler.diagnostics import Diagnostic, MeshwrightError, Span, suggestion
from meshwright.compiler.toml_text import Path, TomlText


@dataclass
class Reading:
    """One document that is being read."""

    toml: TomlText
    faults: list[Diagnostic] = field(default_factory=list)

    def fault(self, code: str, message: str, place: Span, action: str) -> None:
        self.faults.append(Diagnostic(code, message, place, action))

    def finish(self) -> None:
        """Raises MeshwrightError with all faults, in the order of lines, if there are any."""
        if self.faults:
            raise MeshwrightError(*sorted(self.faults, key=_line))

    def table(self, values: Mapping[str, Any], path: Path, what: str, known: Iterable[str]) -> Table:
        """A table, whose unknown keys are faults."""
        known = tuple(known)
        for key in values:
            if key not in known:
                self.fault("E0412", f"unknown key '{key}' in {what}", self.toml.key(*path, key), suggestion(key, known))
        return Table(self, values, path, what)


@dataclass(frozen=True)
class Table:
    """One table of a document. Every entry is read with its fault; a faulty one counts as its default."""

    reading: Reading
    values: Mapping[str, Any]
    path: Path
    what: str

    def has(self, key: str) -> bool:
        return key in self.values

    def missing(self, key: str, example: str) -> None:
        self.reading.fault(
            "E0414", f"{self.what} has no '{key}'", self.reading.toml.key(*self.path), f"add {key} = {example}"
        )

    def value(self, key: str) -> Span:
        return self.reading.toml.value(*self.path, key)

    def text(self, key: str, default: str | None = None, example: str = '"..."') -> str:
        """A text; without a default it must be there."""
        if key not in self.values:
            if default is None:
                self.missing(key, example)
            return default or ""
        found = self.values[key]
        if not isinstance(found, str) or not found.strip():
            self.wrong(key, "a text in quotes", example)
            return default or ""
        return found

    def whole(self, key: str, default: int | None = None, example: str = "8", least: int = 1) -> int:
        """A whole number of at least ``least``."""
        if key not in self.values:
            if default is None:
                self.missing(key, example)
            return least if default is None else default
        found = self.values[key]
        if not isinstance(found, int) or isinstance(found, bool):
            self.wrong(key, "a whole number", example)
        elif found < least:
            self.reading.fault(
                "E0417", f"{key} is {found}", self.value(key), f"give a whole number of at least {least}"
            )
        else:
            return found
        return default or least

    def number(self, key: str, default: float, least: float = 0.0, most: float = math.inf) -> float:
        """A number without a unit, within bounds (``least`` itself is allowed)."""
        if key not in self.values:
            return default
        found = self.values[key]
        if not isinstance(found, (int, float)) or isinstance(found, bool):
            self.wrong(key, "a number", f"{default}")
        elif not least <= found <= most:
            bounds = f"between {least:g} and {most:g}" if math.isfinite(most) else f"of at least {least:g}"
            self.reading.fault("E0417", f"{key} is {found}", self.value(key), f"give a number {bounds}")
        else:
            return float(found)
        return default

    def quantity(self, key: str, quantity: Quantity, default: float | None = None, *, zero: bool = False) -> float:
        """A number in base units or a text with a unit; more than nothing unless ``zero``."""
        example = EXAMPLES[quantity]
        if key not in self.values:
            if default is None:
                self.missing(key, example.split(" or ")[0].split(" (")[0])
            return 1.0 if default is None else default
        try:
            found = parse_quantity(self.values[key], quantity)
        except ValueError as reason:
            self.reading.fault(
                "E0416", f"{key}: {reason}", self.value(key), f"write {example}, or a number in {BASE[quantity]}"
            )
            return 1.0 if default is None else default
        if not math.isfinite(found) or found < 0 or (found == 0 and not zero):
            self.reading.fault("E0417", f"{key} is {self.values[key]}", self.value(key), f"write {example}")
            return 1.0 if default is None else default
        return found

    def tables(self, key: str, what: str, known: Iterable[str]) -> list[Table]:
        """A list of tables (``[[key]]``)."""
        found = self.values.get(key, [])
        if not isinstance(found, list) or not all(isinstance(one, dict) for one in found):
            self.wrong(key, "tables", f"[[{key}]] and the entries below it", write=False)
            return []
        known = tuple(known)
        return [self.reading.table(one, (*self.path, key, i), what, known) for i, one in enumerate(found)]

    def wrong(self, key: str, kind: str, example: str, *, write: bool = True) -> None:
        action = f"write {key} = {example}" if write else f"write {example}"
        self.reading.fault("E0413", f"'{key}' must be {kind}", self.value(key), action)


def _line(fault: Diagnostic) -> tuple[int, int]:
    return (fault.place.line, fault.place.column) if isinstance(fault.place, Span) else (0, 0)
