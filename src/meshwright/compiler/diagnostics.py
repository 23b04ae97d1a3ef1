"""Errors that reach a user: a code, the place, what is wrong, and one action to take.

Every fault of the input is raised as :class:`MeshwrightError`, which carries one or more
:class:`Diagnostic`. A command prints them and exits with 1; no traceback reaches a user.
A fault of Meshwright itself is an :class:`InternalError`.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Span:
    """A place in a text file. ``line`` and ``column`` count from 1; ``text`` is the whole line."""

    file: str
    line: int
    column: int
    length: int = 1
    text: str = ""

    def render(self) -> str:
        head = f"  --> {self.file}:{self.line}:{self.column}"
        if not self.text:
            return head
        number = str(self.line)
        gutter = " " * len(number)
        text = self.text.rstrip("\n").replace("\t", " ")
        caret = " " * (self.column - 1) + "^" * max(1, min(self.length, len(text) - self.column + 1))
        return f"{head}\n {gutter} |\n {number} | {text}\n {gutter} | {caret}"


@dataclass(frozen=True)
class Origin:
    """Where a node of a traced program comes from: module path, user file and line, source line."""

    module: str = ""
    file: str = ""
    line: int = 0
    text: str = ""

    def render(self) -> str:
        place = f"{self.file}:{self.line}" if self.file else "the captured program"
        head = f"  --> {place}" + (f" (in module '{self.module}')" if self.module else "")
        return head + (f"\n      {self.text}" if self.text else "")


@dataclass(frozen=True)
class Diagnostic:
    """One finding. ``code`` is ``E0301`` or ``W0101``; ``action`` is one thing to do about it."""

    code: str
    message: str
    place: Span | Origin | None = None
    action: str = ""
    notes: tuple[str, ...] = field(default=())
    warns: bool = False
    """Whether it is told as a warning, though its code is that of an error: where nothing fails for it."""

    @property
    def kind(self) -> str:
        """``error`` or ``warning``."""
        return "warning" if self.warns or self.code.startswith("W") else "error"

    def render(self) -> str:
        lines = [f"{self.kind}[{self.code}]: {self.message}"]
        if self.place is not None:
            lines.append(self.place.render())
        lines.extend(f"  = note: {note}" for note in self.notes)
        if self.action:
            lines.append(f"  = help: {self.action}")
        return "\n".join(lines)

    @property
    def file_and_line(self) -> tuple[str, int]:
        """Where it is; empty and 0 if that is no line of a file."""
        return (self.place.file, self.place.line) if self.place is not None else ("", 0)

    def plain(self) -> dict[str, object]:
        """As plain data, for reports."""
        file, line = self.file_and_line
        return {
            "code": self.code,
            "level": self.kind,
            "message": self.message,
            "file": file,
            "line": line,
            "notes": list(self.notes),
            "action": self.action,
        }


class MeshwrightError(Exception):
    """A fault of the input, told as diagnostics."""

    def __init__(self, *diagnostics: Diagnostic) -> None:
        super().__init__("\n".join(d.render() for d in diagnostics))
        self.diagnostics = diagnostics


class DiagnosticWarning(UserWarning):
    """A warning that is told by ``warnings``: its text is the rendered diagnostic."""

    def __init__(self, diagnostic: Diagnostic) -> None:
        super().__init__(diagnostic)
        self.diagnostic = diagnostic

    def __str__(self) -> str:
        return self.diagnostic.render()


class InternalError(Exception):
    """A fault of Meshwright: names the pass; the command line leaves a file that reproduces it."""


def error(
    code: str,
    message: str,
    place: Span | Origin | None = None,
    action: str = "",
    notes: Iterable[str] = (),
) -> MeshwrightError:
    """A :class:`MeshwrightError` of one diagnostic, to be raised by the caller."""
    return MeshwrightError(Diagnostic(code, message, place, action, tuple(notes)))


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name most like ``name``, or None when nothing is near. One that differs in case alone comes first."""
    known = list(known)
    for one in known:
        if one.lower() == name.lower():
            return one
    found = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    return found[0] if found else None


def suggestion(name: str, known: Iterable[str]) -> str:
    """``did you mean 'x'?`` or the list of what is known."""
    names = sorted(known)
    found = nearest(name, names)
    if found:
        return f"did you mean '{found}'?"
    return "known: " + ", ".join(names) if names else ""


def input_name(path: str) -> str:
    """A tensor of the batch as a person would name it: ``positional input 0``, ``'tokens'``, ``'images.left'``."""
    head, _, rest = path.partition(".")
    if not head.isdigit():
        return f"'{path}'"
    return f"'{rest}' of positional input {head}" if rest else f"positional input {head}"
