"""Writes what ``--output`` asks for."""

from __future__ import annotations

from pathlib import Path

from meshwright.compiler.diagnostics import error


def write(path: Path, text: str, code: str, option: str = "--output") -> None:
    """Write a file, with its folder. Raises MeshwrightError of the code."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as fault:
        raise error(code, f"cannot write {path}: {fault.strerror}", action=f"give another {option}") from None
