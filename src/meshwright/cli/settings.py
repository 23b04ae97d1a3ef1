"""Reads ``--set name=value``, ``--precision`` and ``--separability``."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated

import typer

from meshwright.compiler.diagnostics import error

if TYPE_CHECKING:
    from meshwright.compiler.plan import Declaration, Precision


Separability = Annotated[
    list[str] | None,
    typer.Option(
        "--separability",
        help="What a coupling of samples means in microbatches: global, or a line, module or kind with one of global, "
        "per-microbatch, per-data-rank: aux=global. May be repeated.",
    ),
]


def overrides(given: list[str]) -> dict[str, float]:
    """The settings by name. Raises E0902 for text that is no ``name=number``."""
    found: dict[str, float] = {}
    for text in given:
        match = re.fullmatch(r"\s*([A-Za-z_][\w ]*?)\s*=\s*(\S+)\s*", text)
        number = _number(match[2]) if match else None
        if match is None or number is None:
            raise error("E0902", f"'{text}' is not name=number", action="write --set batch=8, say")
        if match[1] in found:
            raise error("E0902", f"'{match[1]}' is set twice", action="give it once")
        found[match[1]] = number
    return found


def _number(text: str) -> float | None:
    try:
        return int(text)
    except ValueError:
        pass
    try:
        return float(text)
    except ValueError:
        return None


def read_precision(text: str | None) -> Precision | None:
    """A precision that was given. Raises E0321 for one that is not known."""
    from meshwright.compiler.precision_text import parse_precision

    return parse_precision(text) if text is not None else None


def read_separability(given: list[str] | None) -> tuple[Declaration, ...]:
    """What was declared of couplings of samples. Raises E0765 for what cannot be understood."""
    from meshwright.compiler.separability_text import declarations

    return declarations(given)
