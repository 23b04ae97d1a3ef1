"""What is in memory when ops are run as fused kernels: less than when each of them is run by itself.

An op that is written in others is one kernel, which needs no memory for values on the way; what is made and read within
one kernel is never written. What backward reads is kept as the program says.
"""

from __future__ import annotations

from dataclasses import replace

from meshwright.compiler.summary import Buffer, GraphSummary, Kernel, RankSummary
from meshwright.compiler.timeline.fusion import joined, read_by


def materialised(summary: RankSummary, fusion: str) -> RankSummary:
    """The summary with the buffers that there are under ``fusion`` (one of FUSIONS)."""
    if fusion == "none":
        return summary
    return replace(
        summary,
        prologue=_graph(summary.prologue, fusion),
        micro=_graph(summary.micro, fusion),
        update=_graph(summary.update, fusion),
    )


def _graph(graph: GraphSummary, fusion: str) -> GraphSummary:
    kernel_of = {position: group[0] for group in joined(graph, fusion) for position in group}
    readers = read_by(graph)
    inside = {
        position
        for position, kernel in kernel_of.items()
        if position in readers and all(kernel_of.get(reader) == kernel for reader in readers[position])
    }
    left = tuple(b for b in graph.buffers if not (_on_the_way(b, graph) or _within_a_kernel(b, graph, inside)))
    return replace(graph, buffers=left)


def _on_the_way(buffer: Buffer, graph: GraphSummary) -> bool:
    """Whether it is what an op written in others needs between them."""
    work = graph.items[buffer.born].work if 0 <= buffer.born < len(graph.items) else None
    return buffer.kind == "workspace" and isinstance(work, Kernel) and bool(work.parts)


def _within_a_kernel(buffer: Buffer, graph: GraphSummary, inside: set[int]) -> bool:
    return (
        buffer.born in inside
        and buffer.name == graph.items[buffer.born].name
        and buffer.kind in ("activations", "temporaries")
        and buffer.last < len(graph.items)
    )
