"""TOML with places: values from ``tomllib``, and where each key and value stands in the text.

``tomllib`` gives values without positions, and an error about a file should point at its line. This
reads the text a second time, only for positions: table headers, keys and the extent of values.
"""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass
from typing import Any

from meshwright.compiler.diagnostics import Span, error

Path = tuple[str | int, ...]
"""The way to a value: ``("parameters", 0, "pattern")``."""

_HEADER = re.compile(r"[ \t]*(\[\[?)[ \t]*([^\]\n]+?)[ \t]*\]\]?")
_NAME = r"""(?:[A-Za-z0-9_-]+|"[^"\n]*"|'[^'\n]*')"""
_PART = re.compile(_NAME)
_KEY = re.compile(rf"[ \t]*({_NAME}(?:[ \t]*\.[ \t]*{_NAME})*)[ \t]*=[ \t]*")
_TOKEN = re.compile(
    r'"""(?:\\.|[^\\])*?"""|'
    + r"'''.*?'''|"
    + r'"(?:\\.|[^"\\\n])*"|'
    + r"'[^'\n]*'|#[^\n]*|[\[\]{}\n]|[^\[\]{}\n#\"']+",
    re.DOTALL,
)


@dataclass(frozen=True)
class TomlText:
    """A TOML document, its values and the places of its keys and values."""

    file: str
    text: str
    values: dict[str, Any]
    keys: dict[Path, tuple[int, int]]
    """By path: the extent of the key (or table header) in the text."""
    extents: dict[Path, tuple[int, int]]
    """By path: the extent of the value."""

    def key(self, *path: str | int) -> Span:
        """The place of a key, or of the nearest enclosing table that has one."""
        return self._place(self.keys, path)

    def value(self, *path: str | int, piece: str = "", occurrence: int = 0) -> Span:
        """The place of a value; with ``piece``, of that text within it (the first occurrence is 0)."""
        if path not in self.extents:
            return self.key(*path)
        start, end = self.extents[path]
        if piece:
            # whole words first, so that the axis `a` is not found inside `data`
            found = list(re.finditer(rf"(?<!\w){re.escape(piece)}(?!\w)", self.text[start:end]))
            at = found[min(occurrence, len(found) - 1)].start() if found else self.text[start:end].find(piece)
            if at >= 0:
                return self.span(start + at, start + at + len(piece))
        return self.span(start, end)

    def span(self, start: int, end: int) -> Span:
        line_start = self.text.rfind("\n", 0, start) + 1
        line_end = self.text.find("\n", start)
        line_end = len(self.text) if line_end < 0 else line_end
        return Span(
            self.file,
            self.text.count("\n", 0, start) + 1,
            start - line_start + 1,
            max(1, min(end, line_end) - start),
            self.text[line_start:line_end],
        )

    def _place(self, table: dict[Path, tuple[int, int]], path: Path) -> Span:
        for length in range(len(path), 0, -1):
            if path[:length] in table:
                return self.span(*table[path[:length]])
        return self.span(0, 1)


def parse_toml(text: str, file: str, code: str) -> TomlText:
    """Parse TOML. Raises the error ``code`` with the place that tomllib names."""
    text = text.replace("\r\n", "\n")
    try:
        values = tomllib.loads(text)
    except tomllib.TOMLDecodeError as fault:
        raise error(code, *_syntax(str(fault), file, text), action="correct the TOML syntax there") from None
    keys, extents = _positions(text)
    return TomlText(file, text, values, keys, extents)


def _syntax(message: str, file: str, text: str) -> tuple[str, Span]:
    blank = TomlText(file, text, {}, {}, {})
    found = re.search(r"\(at line (\d+), column (\d+)\)", message)
    if found:
        lines = text.split("\n")
        start = sum(len(line) + 1 for line in lines[: int(found[1]) - 1]) + int(found[2]) - 1
    else:
        start = max(0, len(text.rstrip()) - 1)
    reason = re.sub(r"\s*\(at .*\)$", "", message)
    return f"this is not TOML: {reason[:1].lower()}{reason[1:]}", blank.span(start, start + 1)


def _positions(text: str) -> tuple[dict[Path, tuple[int, int]], dict[Path, tuple[int, int]]]:
    """The extents of keys and values of a text that is known to be valid TOML."""
    keys: dict[Path, tuple[int, int]] = {}
    extents: dict[Path, tuple[int, int]] = {}
    counts: dict[Path, int] = {}
    table: Path = ()
    at = 0
    while at < len(text):
        header = _HEADER.match(text, at)
        key = None if header else _KEY.match(text, at)
        if header:
            table = _table(_names(header[2]), header[1] == "[[", counts)
            keys[table] = (header.start(1), header.end())
            keys.setdefault(table[:1], keys[table])
            at = header.end()
        elif key:
            path = (*table, *_names(key[1]))
            end = _value_end(text, key.end())
            keys[path] = (key.start(1), key.end(1))
            extents[path] = (key.end(), end)
            at = end
        newline = text.find("\n", at)
        at = len(text) if newline < 0 else newline + 1
    return keys, extents


def _names(dotted: str) -> Path:
    return tuple(part.strip("\"'") for part in _PART.findall(dotted))


def _table(names: Path, repeated: bool, counts: dict[Path, int]) -> Path:
    """The path of a header; a table inside a repeated one belongs to its last element."""
    path: Path = ()
    for depth, name in enumerate(names):
        path = (*path, name)
        if repeated and depth == len(names) - 1:
            counts[path] = counts.get(path, -1) + 1
        if path in counts:
            path = (*path, counts[path])
    return path


def _value_end(text: str, start: int) -> int:
    """Where a value that begins at ``start`` ends: at the line's end outside brackets and strings."""
    depth, end = 0, start
    for token in _TOKEN.finditer(text, start):
        found = token[0]
        if found == "\n" and depth == 0:
            break
        if found in "[{":
            depth += 1
        elif found in "]}":
            depth -= 1
        if not found.startswith("#") and found.strip():
            end = token.start() + len(found.rstrip())
    return end
