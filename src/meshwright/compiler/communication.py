"""What a rank communicates in one step: calls and bytes by collective, mesh axes and graph; read off a summary."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from meshwright.compiler.mesh import Mesh
from meshwright.compiler.summary import GraphSummary, Message, RankSummary


@dataclass(frozen=True)
class Traffic:
    """The collectives of one kind over the same mesh axes in one graph, over a whole step.

    ``payload`` is the size of the larger side (the gathered tensor, the tensor to be reduced) in bytes. ``sent``
    is what each rank sends if the collective runs as a ring over its group of n: 2(n-1)/n of the payload for
    an all-reduce, (n-1)/n for the others.
    """

    graph: str
    kind: str
    axes: tuple[str, ...]
    calls: int
    payload: int
    sent: int


def communication(summary: RankSummary) -> list[Traffic]:
    """All traffic of a rank in one step; ``micro`` counts once for every microbatch, a block once for every repeat."""
    graphs = (
        ("prologue", summary.prologue, 1),
        ("micro", summary.micro, summary.microbatches),
        ("update", summary.update, 1),
    )
    return [t for name, graph, n in graphs for t in graph_traffic(graph, summary.mesh, name, n, summary.repeats)]


def graph_traffic(
    graph: GraphSummary, mesh: Mesh, name: str, times: int = 1, repeats: Mapping[str, int] | None = None
) -> list[Traffic]:
    """The traffic of a graph that is run that many times."""
    found: dict[tuple[str, tuple[str, ...]], list[tuple[int, int]]] = {}
    for item in graph.items:
        if isinstance(item.work, Message):
            count = times // item.work.shared * (repeats or {}).get(item.block, 1)
            found.setdefault((item.work.kind, item.work.axes), []).append((count, item.work.payload))
    return [
        Traffic(
            name,
            kind,
            axes,
            sum(n for n, _ in messages),
            sum(n * payload for n, payload in messages),
            sum(n * sent(kind, payload, mesh.size(*axes)) for n, payload in messages),
        )
        for (kind, axes), messages in found.items()
    ]


def sent(kind: str, payload: int, ranks: int) -> int:
    """The bytes that each of ``ranks`` sends in a ring."""
    return payload * (ranks - 1) * (2 if kind == "all-reduce" else 1) // ranks
