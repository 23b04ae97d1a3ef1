"""How much memory a rank needs in one step, by kind, and when it needs most; read off a summary.

Parameters, optimizer state, buffers and constants are held throughout, gradient accumulators while there are several
microbatches, everything else from the item that makes it to the last one that reads it. Repeated blocks are not
unrolled; see :mod:`meshwright.compiler.repetition`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from meshwright.compiler.prediction import Memory, Moment
from meshwright.compiler.repetition import STATES, Change, State, further_copies
from meshwright.compiler.summary import KINDS, GraphSummary, RankSummary


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


_OWN = "own"
"""The state of what the summary itself has."""
_TOGETHER = ((_OWN, "first"), (_OWN, "first", "second"), (_OWN, "last"), (_OWN, "last", "last but one"))
"""The states whose memory is there at once, where there are further copies."""


def _measure(
    name: str, graph: GraphSummary, held: Mapping[str, int], repeats: Mapping[str, int], meter: _Meter
) -> None:
    """Go through a graph and measure what lives at every item."""
    end = len(graph.items)
    own = (Change(_OWN, b.kind, b.bytes, max(b.born, 0), b.last) for b in graph.buffers)
    changes = _by_item([*own, *further_copies(graph, repeats)], end)
    live: dict[State, dict[str, int]] = {state: {} for state in (_OWN, *STATES)}
    live[_OWN].update(held)
    totals = {state: sum(kinds.values()) for state, kinds in live.items()}
    together = _TOGETHER if repeats else ((_OWN,),)
    grown = set(held)
    for position in range(max(end, 1)):
        for state, kind, size in changes.get(position, ()):
            live[state][kind] = live[state].get(kind, 0) + size
            totals[state] += size
            if size > 0:
                grown.add(kind)
        if position and not grown:
            continue  # no kind has become more, so nothing can be the most
        for states in together:
            total = sum([totals[state] for state in states])
            meter.by_graph[name] = max(meter.by_graph.get(name, 0), total)
            for kind in grown:
                size = sum([live[state].get(kind, 0) for state in states])
                if size > meter.most[kind]:
                    meter.most[kind] = size
            if total > meter.peak:
                item = graph.items[position] if position < end else None
                meter.peak = total
                meter.at = Moment(name, item.name, item.phase, item.block) if item else Moment(name, "")
                sizes = {kind: sum(live[state].get(kind, 0) for state in states) for kind in KINDS}
                meter.by_kind = {kind: size for kind, size in sizes.items() if size}
        grown.clear()


def _by_item(changes: Iterable[Change], end: int) -> dict[int, list[tuple[State, str, int]]]:
    """By item: what comes to life there, and what is gone there."""
    found: dict[int, list[tuple[State, str, int]]] = {}
    for change in changes:
        found.setdefault(change.first, []).append((change.state, change.kind, change.bytes))
        if change.last < end:
            found.setdefault(change.last + 1, []).append((change.state, change.kind, -change.bytes))
    return found
