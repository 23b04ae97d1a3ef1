"""Fields of a raw row: numbers that can be of something that was run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.published.rows import Unreadable

MOST = 1e18
"""Numbers from here on are taken for mistakes."""


def source_of(raw: Mapping[str, Any]) -> str:
    """The title of a raw row's source."""
    source = raw.get("source")
    title = source.get("title") if isinstance(source, Mapping) else source
    return str(title or "unknown")


def part(raw: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """A part of a raw row; empty if there is none."""
    found = raw.get(name)
    return found if isinstance(found, Mapping) else {}


def optional(of: Mapping[str, Any], name: str) -> float | None:
    """A positive number; None if there is none, or one that can be of nothing that was run."""
    value = of.get(name)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < MOST:
        return None
    return float(value)


def number(of: Mapping[str, Any], name: str, default: float) -> float:
    found = optional(of, name)
    return default if found is None else found


def whole(of: Mapping[str, Any], name: str, default: int) -> int:
    """A whole number; that one if there is none."""
    found = optional(of, name)
    return default if found is None or found != int(found) else int(found)


def count(of: Mapping[str, Any], name: str, what: str) -> int:
    found = whole(of, name, 0)
    if not found:
        raise Unreadable(f"{what} is not told" if of.get(name) is None else f"{what} is {of.get(name)!r:.40}")
    return found
