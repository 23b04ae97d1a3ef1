"""Reading and writing rows by the order of a sort, or by its inverse."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from meshwright.frontend.capture.constants import TooLarge, evaluate
from meshwright.frontend.capture.unsorted.states import Inverse, Known, Numbers, Sorted, State, arguments
from meshwright.frontend.capture.unsorted.steady import filled_with, steady
from meshwright.frontend.capture.unsorted.writer import Writer

aten = torch.ops.aten
StateOf = Callable[[fx.Node], State | None]


@dataclass(frozen=True)
class Access:
    """Rows of ``x`` along ``dim`` at the places of ``index``; written, if there are ``values``."""

    x: fx.Node
    dim: int
    index: fx.Node
    values: fx.Node | None = None
    adds: bool = False
    factor: Any = 1


def access(node: fx.Node) -> Access | None:
    """The read or write of whole rows along one dim that a node is."""
    given = arguments(node)
    name = str(node.target).removeprefix("aten.").partition(".")[0].removeprefix("_unsafe_")
    x = given.get("self")
    if not isinstance(x, fx.Node):
        return None
    shape = x.meta["val"].shape
    if name in ("index", "index_put"):
        places = [(d, i) for d, i in enumerate(given["indices"]) if i is not None]
        if len(places) != 1 or places[0][1].meta["val"].dim() != 1 or places[0][1].meta["val"].dtype == torch.bool:
            return None
        dim, index = places[0]
        if name == "index":
            return Access(x, dim, index)
        return _written(Access(x, dim, index, given["values"], bool(given["accumulate"])), index.meta["val"].shape[0])
    if name not in ("index_select", "gather", "index_add", "scatter_add", "scatter") or not len(shape):
        return None
    dim, index = given["dim"] % len(shape), given["index"]
    along = index.meta["val"].shape
    others = [(a, b) for d, (a, b) in enumerate(zip(along, shape, strict=False)) if d != dim]
    if name in ("gather", "scatter_add", "scatter") and (len(along) != len(shape) or any(a != b for a, b in others)):
        return None
    if name in ("index_select", "gather"):
        return Access(x, dim, index)
    values = given.get("source", given.get("src"))
    if not isinstance(values, fx.Node):
        return None
    return _written(
        Access(x, dim, index, values, name != "scatter", given.get("alpha", 1)), along[0 if len(along) == 1 else dim]
    )


def _written(found: Access, rows: int) -> Access | None:
    """A write of values that are not broadcast and are of the dtype of what they are written into."""
    assert found.values is not None
    x, values = found.x.meta["val"], found.values.meta["val"]
    wanted = [*x.shape[: found.dim], rows, *x.shape[found.dim + 1 :]]
    return found if list(values.shape) == wanted and values.dtype == x.dtype else None


def read(found: Access, state: StateOf, constant: set[fx.Node]) -> Known | None:
    """Rows that are brought into sorted order, or back."""
    x, dim, at, own = found.x, found.dim, state(found.index), state(found.x)
    if isinstance(at, Inverse) and _along(at, found):
        if not isinstance(own, Sorted) or (own.listing, own.dim) != (at.listing, dim) or own.numbers is not None:
            return None
        return Known((None,), lambda w: w.item(x))
    if not isinstance(at, Sorted) or at.numbers is None or not _along(at, found) or own is not None:
        return None
    numbers, items = at.numbers, at.listing.size
    if not numbers.cover(x.meta["val"].shape[dim], items):
        return None
    named = _numbers(x, items) if numbers == Numbers() and x in constant else None
    build = None if named is not None else (lambda w: w.spread(w.item(x), dim, numbers, items))
    return Known((Sorted(at.listing, dim, named),), build)


def write(found: Access, state: StateOf, constant: set[fx.Node]) -> Known | None:
    """Rows that are brought back to where they came from, and gradients of rows that were."""
    x, dim, values, at = found.x, found.dim, found.values, state(found.index)
    assert values is not None
    own, given = state(x), state(values)
    if isinstance(at, Inverse) and _along(at, found):
        kept = steady(x, dim) if own is None else own == Sorted(at.listing, dim)
        if given is not None or not kept or x.meta["val"].shape[dim] != at.listing.size:
            return None
        return Known((Sorted(at.listing, dim),), lambda w: _sum(w, found, w.item(values)))
    if not isinstance(at, Sorted) or at.numbers is None or not _along(at, found):
        return None
    numbers, rows, items = at.numbers, x.meta["val"].shape[dim], at.listing.size
    counts = values in constant and given is None and _numbers(values, items) == Numbers()
    if counts and not found.adds and numbers == Numbers() and rows == items:
        return Known((Inverse(at.listing, 0),), None)
    fits = given == Sorted(at.listing, dim) or (given is None and steady(values, dim))
    blank = own is None or steady(x, dim)
    if not fits or not numbers.cover(rows, items):
        return None
    if found.adds:
        return Known((None,), lambda w: _sum(w, found, w.fold(w.item(values), dim, numbers, rows))) if blank else None
    return Known((None,), lambda w: w.item(values)) if numbers == Numbers() else None


def _along(at: Sorted | Inverse, found: Access) -> bool:
    """Whether the places run along the dim that they index."""
    return at.dim == (found.dim if found.index.meta["val"].dim() > 1 else 0)


def _sum(w: Writer, found: Access, values: fx.Node) -> fx.Node:
    if not found.adds:
        return values
    if found.factor != 1:
        values = w.call(aten.mul.Tensor, values, found.factor)
    return values if filled_with(found.x) == 0 else w.call(aten.add.Tensor, w.item(found.x), values)


def _numbers(node: fx.Node, items: int) -> Numbers | None:
    """Which numbers a constant holds of each item."""
    value = node.meta["val"]
    if value.dtype not in (torch.int32, torch.int64) or list(value.shape) != [items]:
        return None
    try:
        known = evaluate(node).to(torch.int64)
    except TooLarge:
        return None
    line = torch.arange(items)
    rows = int(known.max()) + 1
    if rows < 1 or items % rows:
        return None
    tried: Sequence[tuple[Numbers, Tensor]] = (
        (Numbers(items // rows), line // (items // rows)),
        (Numbers(1, rows), line % rows),
    )
    return next((numbers for numbers, wanted in tried if torch.equal(known, wanted)), None)
