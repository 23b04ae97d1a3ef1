"""Batches to try, and changes of their tokens: random ones, equal ones, and numbers that the model looks for."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from meshwright.compiler.causality.feed import Feed, Leaf, Role
from meshwright.compiler.causality.resizing import drawn
from meshwright.compiler.causality.typed import distinct


@dataclass(frozen=True)
class Edit:
    """Change positions of one row: after ``cut``, or those listed."""

    row: int
    positions: tuple[int, ...]
    how: str
    """``random``, ``first`` (the row's first token), or ``number`` with ``number``."""
    number: int = 0


@dataclass(frozen=True)
class Base:
    """How the tokens of a batch are chosen before the change."""

    how: str
    """``random``, ``given``, ``equal`` (one token everywhere), ``few`` (of two tokens), or ``number`` sprinkled."""
    number: int = 0


def bases(numbers: list[int], integers: bool) -> list[Base]:
    """Kinds of batch, the most telling first."""
    made = [Base("random"), Base("given"), Base("equal", 0), Base("few")]
    if integers:
        made += [Base("begin", n) for n in numbers] + [Base("number", n) for n in numbers]
        made += [Base("equal", n) for n in (1, 2, 3)]
    else:
        made += [Base("large"), Base("small"), Base("begin", 0)]
    return made


def edits(feed: Feed, numbers: list[int], dice: random.Random) -> Iterator[Edit]:
    """Changes to a batch, the most telling first; documents are changed one by one."""
    length, rows = feed.length, feed.rows
    cuts = [length // 2 - 1, 0, length - 2, -1, length // 3]
    kinds = [("random", 0), ("first", 0), *(("number", n) for n in numbers[:8])]
    listed: list[Edit] = []
    if feed.segments is not None:
        for row in range(min(rows, 2)):
            for one in distinct(feed.segments[row]).tolist():
                places = tuple((feed.segments[row] == one).nonzero()[:, 0].tolist())
                listed.append(Edit(row, places, "random"))
                listed.append(Edit(row, places[-1:], "random"))
    for how, number in kinds:
        for cut in cuts:
            for row in dict.fromkeys((0, rows - 1)):
                if cut < length - 1:
                    listed.append(Edit(row, tuple(range(cut + 1, length)), how, number))
    for place in (length - 1, length // 2, 1):
        for how, number in kinds[:3]:
            listed.append(Edit(dice.randrange(rows), (place,), how, number))
    head = listed[: 8 if feed.segments is None else 16]
    tail = listed[len(head) :]
    dice.shuffle(tail)
    yield from head
    yield from tail


def base_values(feed: Feed, base: Base, vocabulary: dict[int, int], seed: int) -> list[Tensor]:
    """The tensors of a batch of a kind."""
    drawing = torch.Generator().manual_seed(seed)
    values = []
    for number, leaf in enumerate(feed.leaves):
        value = leaf.value
        if leaf.role is Role.TOKENS and base.how != "given":
            value = _base(leaf, base, vocabulary.get(number), drawing, feed)
        values.append(value)
    return values


def _base(leaf: Leaf, base: Base, vocabulary: int | None, drawing: torch.Generator, feed: Feed) -> Tensor:
    shape = list(leaf.value.shape)
    value = drawn(leaf, shape, vocabulary, drawing)
    if leaf.value.is_floating_point():
        if base.how in ("large", "small"):
            return value * (10.0 if base.how == "large" else 0.1)
        if base.how == "equal":
            return _one(value, feed).expand(shape).clone()
        if base.how == "begin":
            places = [slice(None)] * value.dim()
            places[feed.time_dim] = slice(0, feed.length // 2)
            value = value.clone()
            value[tuple(places)] = 0
        return value
    if base.how == "few":
        two = drawn(leaf, [2], vocabulary, drawing)
        return two[torch.randint(2, shape, generator=drawing)]
    if base.how == "equal":
        many = drawn(leaf, [8], vocabulary, drawing)
        return torch.full(shape, int(many[base.number % 8]), dtype=value.dtype)
    if base.how == "number" and _fits(base.number, vocabulary, leaf):
        return torch.where(torch.rand(shape, generator=drawing) < 0.3, base.number, value).to(value.dtype)
    if base.how == "begin" and _fits(base.number, vocabulary, leaf):
        places = [slice(None)] * value.dim()
        places[feed.time_dim] = slice(0, feed.length // 2)
        value = value.clone()
        value[tuple(places)] = base.number
    return value


def _one(value: Tensor, feed: Feed) -> Tensor:
    value = value.narrow(feed.time_dim, 0, 1)
    return value if feed.batch_dim is None else value.narrow(feed.batch_dim, 0, 1)


def edited(feed: Feed, values: list[Tensor], edit: Edit, vocabulary: dict[int, int], seed: int) -> list[Tensor]:
    """The tensors with a change made."""
    drawing = torch.Generator().manual_seed(seed)
    made = []
    places = torch.tensor(edit.positions, dtype=torch.int64)
    for number, (leaf, value) in enumerate(zip(feed.leaves, values, strict=True)):
        if leaf.role is Role.CONTEXT and len(edit.positions) == feed.length and feed.batch_dim is not None:
            value = value.clone()
            other = drawn(leaf, list(value.shape), None, drawing)
            value.select(feed.batch_dim, edit.row).copy_(other.select(feed.batch_dim, edit.row))
        if leaf.role is not Role.TOKENS:
            made.append(value)
            continue
        rows = value.clone()
        view = row_of(rows, feed, edit.row)  # [length, ...]
        given = leaf.value.reshape(-1)
        if edit.how == "random" or (edit.how == "number" and not _fits(edit.number, vocabulary.get(number), leaf)):
            new = drawn(leaf, [len(edit.positions), *view.shape[1:]], vocabulary.get(number), drawing)
            if not value.is_floating_point():  # every one of them another token
                old = view[places]
                again = drawn(leaf, list(new.shape), vocabulary.get(number), drawing)
                new = torch.where(new == old, again, new)
            view[places] = new
        elif edit.how == "first":
            view[places] = view[0].clone()
        else:
            view[places] = torch.tensor(edit.number, dtype=given.dtype)
        made.append(rows)
    return made


def row_of(value: Tensor, feed: Feed, row: int) -> Tensor:
    """A row's positions as a view ``[length, ...]``."""
    if feed.batch_dim is None:
        return value.movedim(feed.time_dim, 0)
    return value.movedim((feed.batch_dim, feed.time_dim), (0, 1))[row]


def _fits(number: int, vocabulary: int | None, leaf: Leaf) -> bool:
    if leaf.value.is_floating_point():
        return True
    known = leaf.value
    low, high = int(known.min()), vocabulary if vocabulary is not None else int(known.max()) + 1
    return min(low, 0) <= number < high
