"""Which items of a graph belong to repeated blocks, and which item of one copy is like which of the other.

A folded program has two copies of a repeated block: the *first* one, which stands for itself, and the *other*, which
stands for all further ones. Together they are a chain of blocks, which runs in passes: what is prepared for all copies
at once, forward, backward; in an update, the part before the gradient norm and the part after it. Blocks of several
kinds that take turns are one chain.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

from meshwright.compiler.summary import Item, Kernel, Message

FIRST, OTHER = 0, 1
Side = tuple[int, int]
"""Which copy, and of which kind of block in the chain."""


@dataclass(frozen=True)
class Chain:
    """``firsts`` stand for themselves, ``others`` for ``count`` copies, kind by kind. Without firsts, nothing like the
    others stands in the program."""

    firsts: tuple[str, ...]
    others: tuple[str, ...]
    count: int


@dataclass(frozen=True)
class Pass:
    """One pass through a chain: the positions of the items of each copy, and for those of the other copy the one of the
    first that is like it."""

    chain: Chain
    firsts: tuple[int, ...]
    others: tuple[int, ...]
    like: Mapping[int, int]


def chains(items: Sequence[Item], repeats: Mapping[str, int]) -> list[Chain]:
    """The chains of a graph, from the blocks that stand for several."""
    names = [b for b, n in repeats.items() if b and n > 1 and not any(b != o and _within(b, o) for o in repeats)]
    content = _content(items, {n.rpartition(".")[0] for n in names})
    found: list[Chain] = []
    for name in (n for n in names if n in content):
        taken = {f for c in found for f in c.firsts} | set(names)
        first = _first(name, content, taken)
        found.append(Chain((first,) if first else (), (name,), repeats[name]))
    return _joined(found)


def passes(items: Sequence[Item], chain: Chain) -> list[Pass]:
    """The passes through a chain, in order."""
    side = _side(chain)
    sides = [side(item.block) for item in items]
    cut = _backward(items) or _second_part(items, sides)
    before = _prepared(items, sides)
    split: dict[int, tuple[list[int], list[int]]] = {}
    for position, where in enumerate(sides):
        if where is not None:
            later = position >= cut or items[position].phase == "backward"
            number = 0 if position in before else 2 if later else 1
            split.setdefault(number, ([], []))[where[0]].append(position)
    return [
        Pass(chain, tuple(firsts), tuple(others), _like(items, sides, firsts, others))
        for _, (firsts, others) in sorted(split.items())
        if others
    ]


def _within(block: str, around: str) -> bool:
    return block == around or block.startswith(around + ".")


def _side(chain: Chain) -> Callable[[str], Side | None]:
    @cache
    def side(block: str) -> Side | None:
        for which, names in ((FIRST, chain.firsts), (OTHER, chain.others)):
            for kind, name in enumerate(names):
                if _within(block, name):
                    return which, kind
        return None

    return side


def _content(items: Sequence[Item], containers: set[str]) -> dict[str, Counter[Hashable]]:
    """What the numbered blocks of these containers consist of."""
    found: dict[str, Counter[Hashable]] = {}
    names: dict[str, list[str]] = {}
    for item in items:
        if item.block not in names:
            names[item.block] = [
                matched[0]
                for c in containers
                if (matched := re.match(re.escape(f"{c}." if c else "") + r"\d+(?=\.|$)", item.block))
            ]
        for name in names[item.block]:
            found.setdefault(name, Counter())[_key(item)] += 1
    return found


def _first(name: str, content: Mapping[str, Counter[Hashable]], taken: set[str]) -> str | None:
    """The block before that is most like this one, if half of the two is alike."""
    container, _, number = name.rpartition(".")
    best: tuple[int, int] = (0, -1)
    for other in content:
        around, _, place = other.rpartition(".")
        if around == container and other not in taken and int(place) < int(number):
            best = max(best, ((content[name] & content[other]).total(), int(place)))
    if 2 * best[0] < content[name].total():
        return None
    return f"{container}.{best[1]}" if container else str(best[1])


def _joined(found: Sequence[Chain]) -> list[Chain]:
    """Chains of equal length whose blocks take turns (0 and 2, 1 and 3) as one."""
    made: list[Chain] = []
    for chain in found:
        before = made[-1] if made else None
        if before and chain.firsts and before.firsts and chain.count == before.count and _turns(before, chain):
            made[-1] = replace(before, firsts=before.firsts + chain.firsts, others=before.others + chain.others)
        else:
            made.append(chain)
    return made


def _turns(one: Chain, other: Chain) -> bool:
    names = (one.firsts[-1], other.firsts[0], one.others[0], other.others[0])
    numbers = [int(n.rpartition(".")[2]) for n in names]
    return len({n.rpartition(".")[0] for n in names}) == 1 and numbers == sorted(numbers)


def _backward(items: Sequence[Item]) -> int:
    """Where the backward pass begins; 0 if there is none."""
    backward = (i for i, x in enumerate(items) if x.phase == "backward" and works(x))
    return next(backward, 0)


def _prepared(items: Sequence[Item], sides: Sequence[Side | None]) -> set[int]:
    """What is made of inputs alone for all copies before anything else is computed: casts of weights. It is a pass of
    its own, unless it is for a message that is begun there too."""
    from_inputs: set[int] = set()
    found: dict[int, set[int]] = {FIRST: set(), OTHER: set()}
    for position, item in enumerate(items):
        side = sides[position]
        if isinstance(item.work, Kernel) and item.reads and all(r < 0 or r in from_inputs for r in item.reads):
            from_inputs.add(position)
            if side is not None:
                found[side[0]].add(position)
        elif isinstance(item.work, Message):
            waiting = list(item.reads)
            while waiting:
                read = waiting.pop()
                if read in found[FIRST] or read in found[OTHER]:
                    found[FIRST].discard(read)
                    found[OTHER].discard(read)
                    waiting.extend(items[read].reads)
        if side is None and works(item) and any(works(items[p]) for p in found[OTHER]):
            return found[FIRST] | found[OTHER]
    return set()


def _second_part(items: Sequence[Item], sides: Sequence[Side | None]) -> int:
    """Where blocks read what was made of something of all of them (the gradient norm); the end if they never do."""
    level = [0] * len(items)
    for position, item in enumerate(items):
        inside = sides[position] is not None
        most = 0
        for read in item.reads:
            if read >= 0:
                turned = inside != (sides[read] is not None) and (level[read] > 0 or not inside)
                most = max(most, level[read] + turned)
        level[position] = most
        if inside and most == 2:
            return position
    return len(items)


def works(item: Item) -> bool:
    """Whether an item is a kernel that takes time."""
    return isinstance(item.work, Kernel) and item.work.kind != "view"


def _like(
    items: Sequence[Item], sides: Sequence[Side | None], firsts: Sequence[int], others: Sequence[int]
) -> dict[int, int]:
    """The n-th item of a kind in one copy is like the n-th of that kind in the other."""
    waiting: dict[Hashable, list[int]] = {}
    for position in reversed(firsts):
        waiting.setdefault((_kind(sides[position]), _key(items[position])), []).append(position)
    found = {}
    for position in others:
        same = waiting.get((_kind(sides[position]), _key(items[position])))
        if same:
            found[position] = same.pop()
    return found


def _kind(side: Side | None) -> int:
    return side[1] if side else -1


def _key(item: Item) -> Hashable:
    """What two items that do the same have in common."""
    work = item.work
    if isinstance(work, Kernel):
        return work.op, work.written, work.sizes, item.recomputed
    if isinstance(work, Message):
        return work.kind, work.axes, work.payload, work.asynchronous
    return type(work).__name__
