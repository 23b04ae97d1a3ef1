"""Sorted order: tensors that are written in the order of a sort, told by items rather than by places.

``order = argsort(key)`` puts item ``order[r]`` into row r. Seen from row r, everything depends on all keys. Seen from
an item, nothing does: its row holds what belongs to it, wherever that row is. So elements of a sorted tensor carry
the code of their item, and their sets are those of the item. An op that goes row by row keeps this; one that brings
back to true positions by the same order, or by its inverse, ends it exactly; any other is given the sets of the whole
listing (:meth:`Listings.settle`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from meshwright.compiler.causality.shadow import Shadow
from meshwright.compiler.causality.typed import distinct
from meshwright.compiler.causality.words import any_over, softened


@dataclass
class Listings:
    """The listings of one run. Code 0 is no item; listing 0 is none."""

    width: int
    listing_of: Tensor = field(default_factory=lambda: torch.zeros(1, dtype=torch.int64))
    keys: Tensor = field(default_factory=lambda: torch.zeros(1, dtype=torch.float64))
    """The value that an item was sorted by."""
    key_deps: Tensor | None = None
    order: list[Tensor] = field(default_factory=list)
    sizes: list[int] = field(default_factory=lambda: [0])

    def add(self, keys: Tensor, deps: Tensor) -> Tensor:
        """New listings, one for each row of ``keys`` ``[rows, items]``. Returns the items' codes, likewise."""
        if self.key_deps is None:
            self.key_deps = torch.zeros((1, self.width), dtype=torch.int64)
            self.order = [torch.zeros(self.width, dtype=torch.int64)]
        rows, count = keys.shape
        base = self.listing_of.shape[0]
        codes = base + torch.arange(rows * count).reshape(rows, count)
        first = len(self.sizes)
        self.listing_of = torch.cat([self.listing_of, first + torch.arange(rows).repeat_interleave(count)])
        self.keys = torch.cat([self.keys, keys.reshape(-1).to(torch.float64)])
        self.key_deps = torch.cat([self.key_deps, deps.reshape(rows * count, -1)])
        self.order.extend(softened(x) for x in any_over(deps, (1,)))
        self.sizes.extend([count] * rows)
        return codes.to(torch.int32)

    def settle(self, shadow: Shadow, value: Tensor | None = None) -> Shadow:
        """The shadow in true positions: every element of a listing may depend on all of them and on the order."""
        if shadow.item is None:
            return shadow if shadow.rank is None else replace(shadow, rank=None)
        listing = self.listing_of[shadow.item.long()]
        known = shadow.known.clone()
        deps = shadow.deps
        deps = torch.zeros((*known.shape, self.width), dtype=torch.int64) if deps is None else deps.clone()
        for one in distinct(listing).tolist():
            if one == 0:
                continue
            here = listing == one
            if value is not None and bool(known[here].all()) and _same(value[here]):
                continue
            union = any_over(deps[here], (0,)) | self.order[one]
            deps[here] |= softened(union)
            known[here] = False
        return Shadow(known, deps, None, None, shadow.trait)

    def complete(self, item: Tensor) -> bool:
        """Whether every listing that occurs is there with all its items."""
        codes = distinct(item[item != 0]).long()
        counts = torch.bincount(self.listing_of[codes], minlength=len(self.sizes))
        return all(n in (0, size) for n, size in zip(counts.tolist(), self.sizes, strict=True))

    def order_of(self, item: Tensor) -> Tensor:
        """What the order of all listings that occur depends on."""
        union = torch.zeros(self.width, dtype=torch.int64)
        for one in distinct(self.listing_of[item.long()]).tolist():
            if one:
                union = union | self.order[one]
        return union

    def row_dims(self, item: Tensor) -> list[int]:
        """The dims along which items of one listing follow one another."""
        listing = self.listing_of[item.long()]
        found = []
        for dim in range(item.dim()):
            count = item.shape[dim]
            if count < 2 or item.stride(dim) == 0:
                continue
            a, b = item.narrow(dim, 0, 1), item.narrow(dim, 1, count - 1)
            same = listing.narrow(dim, 0, 1) == listing.narrow(dim, 1, count - 1)
            if bool(((a != b) & same).any()):
                found.append(dim)
        return found

    def joined(
        self, shadows: Sequence[Shadow], values: Sequence[Tensor], shape: Sequence[int]
    ) -> tuple[list[Shadow], Tensor | None]:
        """Operands of an op that goes element by element, all of ``shape``: in the same listing, or settled.

        Returns them and the items of the result.
        """
        tagged = [s.item.expand(tuple(shape)) for s in shadows if s.item is not None]
        if not tagged:
            return list(shadows), None
        item = tagged[0]
        if all(torch.equal(item, other) for other in tagged[1:]):
            rows = self.row_dims(item)
            if all(s.item is not None or steady(s, v, rows, shape) for s, v in zip(shadows, values, strict=True)):
                return list(shadows), item
        return [self.settle(s, v) for s, v in zip(shadows, values, strict=True)], None


def steady(shadow: Shadow, value: Tensor, dims: Sequence[int], shape: Sequence[int]) -> bool:
    """Whether an operand is the same along dims of the shape that it is broadcast to."""
    known, value = shadow.known.expand(tuple(shape)), value.expand(tuple(shape))
    deps = shadow.expand(shape).deps
    for dim in dims:
        if value.stride(dim) == 0 and known.stride(dim) == 0:
            continue
        fields = [known, value] if deps is None else [known, value, deps]
        if not all(bool((x.narrow(dim, 0, 1) == x).all()) for x in fields):
            return False
    return True


def _same(values: Tensor) -> bool:
    return values.numel() == 0 or bool((values == values.flatten()[0]).all())
