"""How much memory a rank needs in one step, by kind, and when it needs most; read off a summary.

Parameters, optimizer state, buffers and constants are held throughout, gradient accumulators while there are several
microbatches, everything else from the item that makes it to the last one that reads it.

Repeated blocks are not unrolled. What a block's copy keeps from one of its *runs* (its forward pass, say) to a later
one (its backward pass) is there once for every copy that has been through the first run and not yet through
the second. While the copies run, that number goes up or down by one from copy to copy, so the peak among them is at
the first or at the last.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from meshwright.compiler.prediction import Memory, Moment
from meshwright.compiler.summary import KINDS, Buffer, GraphSummary, Item, Kernel, RankSummary

Run = tuple[int, int]
"""The first and the last item of a stretch in which copies of a block run one after the other."""


def memory(summary: RankSummary) -> Memory:
    """The memory of a rank over one step."""
    meter = _Meter()
    during = {**summary.held, "gradients": summary.held.get("gradients", 0) + summary.accumulators}
    for name, graph, held in (
        ("prologue", summary.prologue, summary.held),
        ("micro", summary.micro, during),
        ("update", summary.update, summary.held),
    ):
        _measure(name, graph, held, summary.repeats, meter)
    most = {k: meter.most[k] for k in KINDS if meter.most[k]}
    return Memory(meter.peak, meter.at, meter.by_kind, most, meter.by_graph)


@dataclass
class _Meter:
    """Keeps the peak while the graphs are walked through."""

    peak: int = -1
    at: Moment = field(default_factory=lambda: Moment("", ""))
    by_kind: dict[str, int] = field(default_factory=dict)
    most: Counter[str] = field(default_factory=Counter)
    by_graph: dict[str, int] = field(default_factory=dict)

    def measure(self, live: Counter[str], moment: Moment) -> None:
        total = live.total()
        self.by_graph[moment.graph] = max(self.by_graph.get(moment.graph, 0), total)
        self.most |= live
        if total > self.peak:
            self.peak, self.at, self.by_kind = total, moment, {k: live[k] for k in KINDS if live[k]}


def _measure(
    name: str, graph: GraphSummary, held: Mapping[str, int], repeats: Mapping[str, int], meter: _Meter
) -> None:
    """Go through a graph and measure what lives at every item."""
    end = len(graph.items)
    found = {block: runs(graph.items, block, repeats) for block in repeats}
    own = _Changes(end)
    more = (_Changes(end), _Changes(end))  # of further copies: at the first copy of a run, at the last one
    for buffer in graph.buffers:
        own.lives(buffer, buffer.bytes, max(buffer.born, 0), buffer.last)
        copies = repeats.get(buffer.block, 1)
        if copies > 1:
            for changes, span in zip(more, kept_by_copies(buffer, found[buffer.block], graph.items), strict=True):
                if span is not None:
                    changes.lives(buffer, buffer.bytes * (copies - 1), *span)
    live = Counter(held)
    extra: tuple[Counter[str], ...] = (Counter(), Counter())
    differ = bool(repeats)
    for position in range(max(end, 1)):
        own.apply(position, live)
        item = graph.items[position] if position < end else None
        moment = Moment(name, item.name, item.phase, item.block) if item else Moment(name, "")
        if not differ:
            meter.measure(live, moment)
        else:
            for changes, counter in zip(more, extra, strict=True):
                changes.apply(position, counter)
                meter.measure(live + counter, moment)


@dataclass
class _Changes:
    """By item: what comes to life there, and what is gone there."""

    end: int
    by_item: dict[int, list[tuple[str, int]]] = field(default_factory=dict)

    def lives(self, buffer: Buffer, size: int, first: int, last: int) -> None:
        """From item ``first`` to item ``last``."""
        self.by_item.setdefault(first, []).append((buffer.kind, size))
        if last < self.end:
            self.by_item.setdefault(last + 1, []).append((buffer.kind, -size))

    def apply(self, position: int, live: Counter[str]) -> None:
        for kind, size in self.by_item.get(position, ()):
            live[kind] += size


def runs(items: Sequence[Item], block: str, repeats: Mapping[str, int]) -> list[Run]:
    """The stretches in which copies of a block run: forward and backward, or the sums of the norm and the turns of an
    update. The copy before it in the program, which is like it, is part of them."""
    around = min((b for b in repeats if block == b or block.startswith(b + ".")), key=len)
    before = _copy_before(items, around)
    names = [around] if before is None else [around, before]
    places: dict[str, list[int]] = {}
    for position, item in enumerate(items):
        works = isinstance(item.work, Kernel) and item.work.kind != "view"
        if works and any(item.block == n or item.block.startswith(n + ".") for n in names):
            places.setdefault(item.phase, []).append(position)
    found = [run for phase, where in places.items() for run in (_halves(where) if phase == "update" else [_run(where)])]
    return sorted(found)


def _run(positions: Sequence[int]) -> Run:
    return positions[0], positions[-1]


def _halves(positions: Sequence[int]) -> list[Run]:
    """Cut at the widest gap, if there is one."""
    gaps = [b - a for a, b in itertools.pairwise(positions)]
    if not gaps or max(gaps) == 1:
        return [_run(positions)]
    at = gaps.index(max(gaps)) + 1
    return [_run(positions[:at]), _run(positions[at:])]


def _copy_before(items: Sequence[Item], block: str) -> str | None:
    """The block of the same container that comes before this one and is like it: as many items, if any has."""
    container, _, number = block.rpartition(".")
    if not number.isdecimal():
        return None
    counts: Counter[int] = Counter()
    for item in items:
        matched = re.match(re.escape(container + "." if container else "") + r"(\d+)(?=\.|$)", item.block)
        if matched and isinstance(item.work, Kernel) and item.work.kind != "view":
            counts[int(matched[1])] += 1
    earlier = [n for n in counts if n < int(number)]
    like = [n for n in earlier if counts[n] == counts[int(number)]] or earlier
    return f"{container}.{max(like)}" if container and like else str(max(like)) if like else None


def kept_by_copies(
    buffer: Buffer, found: Sequence[Run], items: Sequence[Item]
) -> tuple[tuple[int, int] | None, tuple[int, int] | None]:
    """From which item to which the further copies of a buffer live: as it is at the first copy of every run, and at
    the last one. None: at most one copy lives at a time."""
    end = len(items)
    if buffer.born < 0:
        first, made = 0, -1
    else:
        made = max((i for i, (start, _) in enumerate(found) if start <= buffer.born), default=-1)
        if made < 0 or (buffer.born > found[made][1] and buffer.last < end):
            return None, None  # made just before the run that needs it
        first = buffer.born if buffer.born > found[made][1] else -1
    used = len(found)
    stop = end
    if buffer.last < end:
        used = max((i for i, (start, _) in enumerate(found) if start <= buffer.last), default=-1)
        if used == made >= 0 and buffer.last > found[made][1]:
            phases = items[buffer.born].phase, items[buffer.last].phase
            if phases == ("forward", "backward"):
                # what the last copy leaves for backward is read by what follows; of the others, by the next copy
                used = made + 1
            elif phases == ("update", "update"):
                used, stop = len(found), buffer.last  # what all copies contribute to the norm
        if used <= made:
            return None, None
    start_late = found[made][0] if first < 0 else first
    start_early = found[made][1] + 1 if first < 0 else first
    stop_late = found[used][0] - 1 if used < len(found) else stop
    stop_early = found[used][1] if used < len(found) else stop
    return (start_early, stop_early), (start_late, stop_late)
