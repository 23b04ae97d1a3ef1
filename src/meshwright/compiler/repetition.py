"""Repeated blocks in time: when their copies run, and what further copies keep meanwhile.

A summary has two copies of a repeated block, of which the second stands for many. What a copy keeps from one of its
*runs* (its forward pass, say) to a later one (its backward pass) is there once for every copy that has been through the
first and not yet through the second. While copies run, that number changes by one from copy to copy, so the most is
needed at the first or at the last of them: of every item there are two states. Where communication is begun ahead
there are two more, since copies in the middle have another copy on both sides.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from meshwright.compiler.summary import Buffer, GraphSummary, Item, Kernel, Message, Wait

Run = tuple[int, int]
"""The first and the last item of a stretch."""
State = str
"""``first`` and ``last``: what there is when the first, the last copy is at this item; ``second``, ``last but one``."""


@dataclass(frozen=True)
class Change:
    """Memory that is there more (or, if negative, less) than the summary has, from one item to another, in a state."""

    state: State
    kind: str
    bytes: int
    first: int
    last: int


_SENDING = ("view", "copy")
"""Kinds of kernels that stand before a message."""
STATES: tuple[State, ...] = ("first", "last", "second", "last but one")


def further_copies(graph: GraphSummary, repeats: Mapping[str, int]) -> Iterator[Change]:
    """What the copies that a summary leaves out keep in memory. ``second`` adds to ``first``, ``last but one`` to
    ``last``."""
    found = {block: _Copies(graph.items, block, repeats) for block in repeats}
    kept: dict[tuple[str, int, int], Counter[str]] = {}
    for buffer in graph.buffers:
        copies = found.get(buffer.block)
        if copies is None or repeats[buffer.block] < 2:
            continue
        span = copies.span(buffer)
        if span is None:
            continue
        size = buffer.bytes * (repeats[buffer.block] - 1)
        yield Change("first", buffer.kind, size, span.first_at_first, span.last_at_first)
        yield Change("last", buffer.kind, size, span.first_at_last, span.last_at_last)
        if span.made >= 0:
            around = (copies.around, span.made, span.used)
            kept.setdefault(around, Counter())[buffer.kind] += buffer.bytes
    for block in dict.fromkeys(c.around for c in found.values() if repeats[c.around] > 1):
        yield from _kept_by_the_next(graph, found[block], repeats[block] - 1)
        yield from _in_the_middle(graph, found[block], kept)


def _kept_by_the_next(graph: GraphSummary, copies: _Copies, further: int) -> Iterator[Change]:
    """What a copy keeps for backward only because it has another copy behind it, which the last one has not: its
    result, where what follows the last one keeps another form of it."""
    if len(copies.runs) != 2 or copies.before is None or graph.items[copies.runs[0][0]].phase != "forward":
        return
    made: dict[str, Counter[tuple[str, str, int]]] = {copies.around: Counter(), copies.before: Counter()}
    kept: dict[str, Counter[tuple[str, str, int]]] = {copies.around: Counter(), copies.before: Counter()}
    for buffer in graph.buffers:
        block = next((b for b in made if within(buffer.block, b)), None)
        span = copies.span(buffer) if block is not None and buffer.born >= 0 else None
        work = graph.items[buffer.born].work if block is not None and buffer.born >= 0 else None
        if block is None or not isinstance(work, Kernel) or graph.items[buffer.born].phase != "forward":
            continue
        key = (work.op, buffer.kind, buffer.bytes)
        made[block][key] += 1
        kept[block][key] += span is not None and (span.made, span.used) == (0, 1)
    (start, end), (later, last) = copies.runs
    for key, count in kept[copies.before].items():
        missing = min(count, made[copies.around][key]) - kept[copies.around][key]
        if missing > 0:
            _, kind, size = key
            yield Change("first", kind, missing * size * further, end + 1, last)
            yield Change("last", kind, missing * size * further, start, later - 1)


def _in_the_middle(
    graph: GraphSummary, copies: _Copies, kept: Mapping[tuple[str, int, int], Counter[str]]
) -> Iterator[Change]:
    """A copy in the middle is like the one that runs last of the two, but has begun what the next one needs, as the
    first of the two has."""
    if len(copies.runs) != 2 or copies.before is None or graph.items[copies.runs[0][0]].phase != "forward":
        return
    begun = {i.name for i in graph.items if isinstance(i.work, Message) and i.work.asynchronous}
    saved = kept.get((copies.around, 0, 1), Counter())
    results = kept.get((copies.around, 1, 2), Counter())
    for phase, last in (("forward", copies.around), ("backward", copies.before)):
        own = copies.region(last, phase)
        if own is None:
            continue
        ahead: Counter[str] = Counter()
        for buffer in graph.buffers:
            ours = buffer.name in begun and within(buffer.block, last) and buffer.phase == phase
            if ours and 0 <= buffer.born < own[0] <= buffer.last:
                ahead[buffer.kind] += buffer.bytes
        if not ahead:
            continue
        less = saved if phase == "forward" else results
        more = Counter(ahead) if phase == "forward" else ahead + saved
        for kind in {*more, *less}:
            yield Change("last but one", kind, more[kind] - less[kind], *own)
        if phase == "backward":
            for kind, size in ahead.items():
                yield Change("second", kind, size, *own)


def within(block: str, around: str) -> bool:
    """Whether a block is another one or a part of it."""
    return block == around or block.startswith(around + ".")


@dataclass(frozen=True)
class _Span:
    """In which runs a buffer is made and used (-1: before all, the number of runs: at the end), and from which item to
    which it lives in the two states."""

    made: int
    used: int
    first_at_first: int
    last_at_first: int
    first_at_last: int
    last_at_last: int


class _Copies:
    """When the copies of a block run, together with the copy before it in the program, which is like it."""

    def __init__(self, items: Sequence[Item], block: str, repeats: Mapping[str, int]) -> None:
        self._items = items
        self.around = min((b for b in repeats if within(block, b)), key=len)
        self.before = _copy_before(items, self.around)
        names = [n for n in (self.around, self.before) if n is not None]
        places: dict[str, list[int]] = {}
        for position, item in enumerate(items):
            if _computes(item) and any(within(item.block, n) for n in names):
                places.setdefault(item.phase, []).append(position)
        self.runs: list[Run] = sorted(
            run for phase, where in places.items() for run in (_halves(where) if phase == "update" else [_run(where)])
        )

    def region(self, block: str, phase: str) -> Run | None:
        """From the first to the last item of one copy, but for what it sends ahead."""
        places = [
            i
            for i, item in enumerate(self._items)
            if item.phase == phase
            and within(item.block, block)
            and (isinstance(item.work, Wait) or (isinstance(item.work, Kernel) and item.work.kind not in _SENDING))
        ]
        return _run(places) if places else None

    def span(self, buffer: Buffer) -> _Span | None:
        """How the further copies of a buffer live; None: at most one copy of it lives at a time."""
        runs, end = self.runs, len(self._items)
        made, since = -1, -1
        if buffer.born >= 0:
            made = max((i for i, (start, _) in enumerate(runs) if start <= buffer.born), default=-1)
            if made < 0 or (buffer.born > runs[made][1] and buffer.last < end):
                return None  # made just before the run that needs it
            since = buffer.born if buffer.born > runs[made][1] else -1
        used, until = len(runs), end
        if buffer.last < end:
            used = max((i for i, (start, _) in enumerate(runs) if start <= buffer.last), default=-1)
            if used == made >= 0 and buffer.last > runs[made][1]:
                phases = self._items[buffer.born].phase, self._items[buffer.last].phase
                if phases == ("forward", "backward"):
                    # what the last copy leaves for backward is read by what follows; of the others, by the next copy
                    used = made + 1
                elif phases == ("update", "update") and used + 1 < len(runs):
                    used, until = len(runs), buffer.last  # what all copies contribute to the norm
            if used <= made:
                return None
        if made < 0:
            since = 0
        return _Span(
            made,
            used,
            runs[made][1] + 1 if since < 0 else since,
            runs[used][1] if used < len(runs) else until,
            runs[made][0] if since < 0 else since,
            runs[used][0] - 1 if used < len(runs) else until,
        )


def _computes(item: Item) -> bool:
    return isinstance(item.work, Kernel) and item.work.kind != "view"


def _run(positions: Sequence[int]) -> Run:
    return positions[0], positions[-1]


def _halves(positions: Sequence[int]) -> list[Run]:
    """Cut at the widest gap, if there is one: the sums of the norm, and the turns of the parameters."""
    gaps = [b - a for a, b in itertools.pairwise(positions)]
    if not gaps or max(gaps) == 1:
        return [_run(positions)]
    at = gaps.index(max(gaps)) + 1
    return [_run(positions[:at]), _run(positions[at:])]


def _copy_before(items: Sequence[Item], block: str) -> str | None:
    """The block of the same container that comes before this one and is like it: as many kernels, if any has."""
    container, _, number = block.rpartition(".")
    if not number.isdecimal():
        return None
    prefix = f"{container}." if container else ""
    pattern = re.compile(re.escape(prefix) + r"(\d+)(?=\.|$)")
    counts: Counter[int] = Counter()
    for item in items:
        matched = pattern.match(item.block)
        if matched and _computes(item):
            counts[int(matched[1])] += 1
    earlier = [n for n in counts if n < int(number)]
    like = [n for n in earlier if counts[n] == counts[int(number)]] or earlier
    return f"{prefix}{max(like)}" if like else None
