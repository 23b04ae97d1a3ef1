"""What the other microbatches keep in memory where microbatches meet: while one runs, all of them are under way."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace

from meshwright.compiler.graph import collectives
from meshwright.compiler.graph.meeting import meeting_places
from meshwright.compiler.graph.rank_program import LocalGraph
from meshwright.compiler.summary import Buffer, GraphSummary

NAME = "microbatches that wait"


def waiting(
    graph: LocalGraph, summary: GraphSummary, microbatches: int, repeats: Mapping[str, int]
) -> Iterator[Buffer]:
    """The buffers of the microbatches that do not run, from each meeting to the next: those that have not come there
    yet keep what crosses the last meeting, those that have keep what crosses the next one. The larger is counted.

    What is kept in a block stands for all its copies. Totals are there once for all microbatches, and not counted.
    """
    names = {node.name for node in meeting_places(graph.module.graph)}
    places = sorted({position for position, item in enumerate(summary.items) if item.name in names})
    if not places or microbatches < 2:
        return
    # the last item of each meeting: messages that it pays come after the sum
    ends = [p for p in places if p + 1 not in places or summary.items[p + 1].name != summary.items[p].name]
    crossing = [_crossing(summary, end, names, repeats) for end in ends]
    end = len(summary.items) - 1
    borders = [-1, *ends, end]
    for number, (before, after) in enumerate(zip([Counter(), *crossing], [*crossing, Counter()], strict=True)):
        most = max(before, after, key=lambda kinds: sum(kinds.values()))
        first, last = borders[number] + 1, borders[number + 1]
        if first > last:
            continue
        item = summary.items[first]
        for kind, size in most.items():
            yield Buffer(size * (microbatches - 1), kind, first, last, item.phase, "", NAME)


def with_waiting(
    summary: GraphSummary, graph: LocalGraph, microbatches: int, rounds: Mapping[str, int]
) -> GraphSummary:
    """A pass of a pipeline with what the other microbatches keep from before a meeting until behind it. ``rounds``: by
    node, how many meetings come before it. What microbatches keep for later passes is counted there."""
    nodes = {node.name: node for node in graph.module.graph.nodes}
    names = {node.name for node in meeting_places(graph.module.graph)}
    if not names or microbatches < 2:
        return summary
    begins: dict[int, int] = {}
    for position, item in enumerate(summary.items):
        if item.name in names:
            begins.setdefault(rounds.get(item.name, 0), position)
    more = []
    for buffer in summary.buffers:
        node = nodes.get(buffer.name)
        if node is None or node.op != "call_function" or buffer.last >= len(summary.items):
            continue
        if buffer.name in names:
            # of a total there is one for all of them; of what falls to each, all parts are there at once
            if node.target not in (collectives.all_reduce, collectives.all_gather):
                more.append(replace(buffer, bytes=buffer.bytes * (microbatches - 1), name=NAME))
            continue
        own = rounds.get(buffer.name, 0)
        readers = [summary.items[buffer.last].name, *(user.name for user in node.users)]
        if all(rounds.get(reader, 0) <= own for reader in readers):
            continue
        # all microbatches make it in its round, which may come before what stands in front of it in the graph
        early = begins.get(own + 1, buffer.born) < buffer.born
        born = -1 if early else buffer.born
        more.append(replace(buffer, bytes=buffer.bytes * (microbatches - 1), born=born, name=NAME))
        if early:
            more.append(replace(buffer, born=-1, last=buffer.born - 1, name=NAME))
    return replace(summary, buffers=(*summary.buffers, *more))


def _crossing(summary: GraphSummary, end: int, meetings: set[str], repeats: Mapping[str, int]) -> Counter[str]:
    """Bytes by kind of what one microbatch keeps beyond an item."""
    found: Counter[str] = Counter()
    for buffer in summary.buffers:
        if buffer.born <= end < buffer.last and buffer.name not in meetings:
            found[buffer.kind] += buffer.bytes * repeats.get(buffer.block, 1)
    return found
