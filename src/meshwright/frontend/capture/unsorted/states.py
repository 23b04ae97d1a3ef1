"""What is known of a node whose rows stand in sorted order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import fx

if TYPE_CHECKING:
    from meshwright.frontend.capture.unsorted.writer import Writer


@dataclass(frozen=True)
class Listing:
    """The order that a sort of ``size`` keys gives. Items are numbered as the keys stand before the sort."""

    sort: fx.Node
    keys: fx.Node
    size: int
    ascending: bool


@dataclass(frozen=True)
class Numbers:
    """Integers that are known of each item: those of item ``i`` are ``i // divisor % modulus`` (0: without that)."""

    divisor: int = 1
    modulus: int = 0

    def cover(self, rows: int, items: int) -> bool:
        """Whether they name each of so many rows equally often."""
        if self.modulus:
            return self.divisor == 1 and self.modulus == rows and items % rows == 0
        return rows * self.divisor == items


@dataclass(frozen=True)
class Sorted:
    """The dim of a node along which there is one row for each item, in the order of the listing."""

    listing: Listing
    dim: int
    numbers: Numbers | None = None
    """What the elements are, where they are places of items."""


@dataclass(frozen=True)
class Inverse:
    """Along the dim there is one row for each item, in true order: its place in the listing."""

    listing: Listing
    dim: int


State = Sorted | Inverse
Build = Callable[["Writer"], fx.Node]
"""Writes what a node is with its rows in true order."""


@dataclass(frozen=True)
class Known:
    """What was found of a node: the state of each result (None: it does not depend on the order), and what it is in
    true order; None where nobody will read that."""

    states: tuple[State | None, ...]
    build: Build | None


def arguments(node: fx.Node) -> dict[str, Any]:
    """The arguments of a call by their names in its schema, defaults filled in."""
    target: Any = node.target
    found: dict[str, Any] = {}
    for number, parameter in enumerate(target._schema.arguments):
        given = node.args[number] if number < len(node.args) else node.kwargs.get(parameter.name, _DEFAULT)
        found[parameter.name] = parameter.default_value if given is _DEFAULT else given
    return found


_DEFAULT: Any = object()
