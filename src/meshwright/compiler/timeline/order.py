"""The order in which the items of a folded graph run when its repeated blocks are written out.

Communication that is begun ahead or waited for late lies among the items of a neighbour. The first and the other copy
lie next to each other and show how; all further copies follow suit. Forward, the first copy comes before the other
one, backward after it. A *zone* is the stretch of the other copy, gone through once for every copy that it stands for.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from meshwright.compiler.summary import Item, Kernel, Wait
from meshwright.compiler.timeline.chains import Pass, chains, passes, works


@dataclass(frozen=True)
class Stretch:
    """Positions of items in the order in which they run. A repeated stretch runs as ``first``, then as ``steady`` for
    the rounds between, then as ``last``; one with ``rounds`` 1 as ``first`` alone."""

    first: tuple[int, ...]
    steady: tuple[int, ...] = ()
    last: tuple[int, ...] = ()
    rounds: int = 1

    def sequence(self) -> Iterator[tuple[int, ...]]:
        """Round by round."""
        yield self.first
        if self.rounds > 1:
            for _ in range(self.rounds - 2):
                yield self.steady
            yield self.last


@dataclass(frozen=True)
class _Zone:
    start: int
    end: int
    """The position after the last."""
    stretch: Stretch


def stretches(items: Sequence[Item], repeats: Mapping[str, int]) -> list[Stretch]:
    """The stretches of a graph in order. Every item comes as often as its block does."""
    zones: list[_Zone] = []
    again: dict[int, int] = {}  # items that no zone could be made for are repeated where they stand
    for chain in chains(items, repeats):
        for each in passes(items, chain):
            zone = _zone(items, each)
            if any(zone.start < z.end and z.start < zone.end for z in zones):
                again.update(dict.fromkeys(each.others, chain.count))
            else:
                zones.append(zone)
    found: list[Stretch] = []
    at = 0
    for zone in sorted(zones, key=lambda z: z.start):
        found += [Stretch(tuple(range(at, zone.start))), zone.stretch]
        at = zone.end
    found.append(Stretch(tuple(range(at, len(items)))))
    return [_again(s, again) for s in found if s.first or s.rounds > 1]


def _again(stretch: Stretch, again: Mapping[int, int]) -> Stretch:
    if not again:
        return stretch
    first, steady, last = (
        tuple(p for p in positions for _ in range(again.get(p, 1)))
        for positions in (stretch.first, stretch.steady, stretch.last)
    )
    return Stretch(first, steady, last, stretch.rounds)


def _zone(items: Sequence[Item], each: Pass) -> _Zone:
    """The zone of a pass with its rounds."""
    forward, border = _border(items, each)

    def near(position: int) -> bool:
        return (position >= border) == forward

    ahead_or_late = {o for o in each.others if not near(o)}  # among the items of the first copy
    shifted = {each.like[o]: o for o in each.others if o in each.like and near(each.like[o])}
    away = ahead_or_late | set(shifted.values())
    own = [o for o in each.others if o not in away]
    if not own:
        own, ahead_or_late, shifted = list(each.others), set(), {}
    start, end = _extended(items, min(own), max(own) + 1, shifted)
    outside = {end if forward else start: [o for p, o in sorted(shifted.items()) if not start <= p < end]}
    inserted = _inserted(items, each, ahead_or_late, own)
    mine = set(own)
    strangers = [p for p in range(start, end) if p not in mine and p not in shifted and p not in ahead_or_late]
    earlier = _belonging_before(items, strangers, start)

    def round_(*, outer: bool, inner: bool, strange: set[int]) -> tuple[int, ...]:
        """``outer``: with those that stand among the items of the first copy, which the rounds next to it bring
        themselves; ``inner``: the first copy's own items that stand here, instead of the other copy's."""
        positions: list[int] = []
        for position in range(start, end):
            positions += () if inner else outside.get(position, ())
            positions += inserted.get(position, ()) if outer else ()
            if position in mine:
                positions.append(position)
            elif position in shifted:
                positions.append(position if inner else shifted[position])
            elif position in strange:
                positions.append(position)
        return (*positions, *(() if inner else outside.get(end, ())), *(inserted.get(end, ()) if outer else ()))

    every = set(strangers)
    count = each.chain.count
    if count == 1:
        return _Zone(start, end, Stretch(tuple(range(start, end))))
    first = round_(outer=forward, inner=forward, strange=earlier)
    last = round_(outer=not forward, inner=not forward, strange=every - earlier)
    return _Zone(start, end, Stretch(first, round_(outer=True, inner=False, strange=set()), last, count))


def _border(items: Sequence[Item], each: Pass) -> tuple[bool, int]:
    """Whether the first copy comes first, and where one copy ends and the other begins: where the least work is on
    the wrong side."""
    firsts = [p for p in each.firsts if works(items[p])] or list(each.firsts)
    others = [p for p in each.others if works(items[p])] or list(each.others)
    if not firsts:
        return True, min(each.others)
    forward = firsts[len(firsts) // 2] < others[len(others) // 2]
    before, after = (set(firsts), set(others)) if forward else (set(others), set(firsts))
    ordered = sorted(before | after)
    wrong = best = sum(_work(items[p]) for p in before)
    border = ordered[0]
    for position, following in zip(ordered, [*ordered[1:], ordered[-1] + 1], strict=True):
        wrong += -_work(items[position]) if position in before else _work(items[position])
        if wrong < best:
            best, border = wrong, following
    # what stands directly before the border and begins the copy after it belongs to that copy
    after_it = set(each.others if forward else each.firsts)
    while border - 1 in after_it:
        border -= 1
    return forward, border


def _work(item: Item) -> float:
    """How much an item does, to tell the body of a block from what accompanies its messages."""
    return 1.0 + item.work.flops + item.work.read + item.work.written if isinstance(item.work, Kernel) else 1.0


def _extended(items: Sequence[Item], start: int, end: int, shifted: Mapping[int, int]) -> tuple[int, int]:
    """The zone with the first copy's items that stand directly before or after it."""
    while start - 1 in shifted or (start > 1 and not _occupies(items[start - 1]) and start - 2 in shifted):
        start -= 1
    while end in shifted or (end + 1 in shifted and not _occupies(items[end])):
        end += 1
    return start, end


def _occupies(item: Item) -> bool:
    return not isinstance(item.work, Kernel) or works(item)


def _inserted(items: Sequence[Item], each: Pass, away: set[int], own: Sequence[int]) -> dict[int, list[int]]:
    """Before which position of the zone the items come that stand among those of the first copy: before what is like
    the first copy's item that follows them there.

    A wait that stands behind the whole first copy comes a block later than its message: before the message of the next
    round is begun, so that it is for that of the round before.
    """
    if not away:
        return {}
    mine = set(own)
    places = sorted((first, other) for other, first in each.like.items() if other in mine)
    found: dict[int, list[int]] = {}
    place_of: dict[int, int] = {}
    for position in sorted(away):
        work = items[position].work
        place = next((other for first, other in places if first > position), None)
        if place is None and isinstance(work, Wait) and work.message in place_of:
            waiting = found[place_of[work.message]]
            waiting.insert(waiting.index(work.message), position)
            continue
        place_of[position] = max(own) + 1 if place is None else place
        found.setdefault(place_of[position], []).append(position)
    return found


def _belonging_before(items: Sequence[Item], strangers: Sequence[int], start: int) -> set[int]:
    """Items of neither copy that belong to what comes before the zone: waits for its messages and what follows."""
    found: set[int] = set()
    for position in strangers:
        item = items[position]
        if isinstance(item.work, Wait):
            before = item.work.message < start or item.work.message in found
        else:
            reads = [r for r in item.reads if r >= 0]
            before = any(r in found for r in reads) and all(r in found or r < start for r in reads)
        if before:
            found.add(position)
    return found
