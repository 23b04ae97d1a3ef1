"""What a rank's value is: a logical value and how the ranks hold it; or nothing that can be said."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from meshwright.compiler.equivalence.layout import Layout


@dataclass(frozen=True, slots=True)
class Related:
    """A rank's value: a logical value, and how the ranks hold it."""

    term: int
    layout: Layout


class Unknown:
    """A value behind a place where something was found: nothing more is said of it."""


UNKNOWN = Unknown()
Held = Any
"""Related, a list of them, a Place, or UNKNOWN."""
