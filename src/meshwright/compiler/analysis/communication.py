"""What a rank communicates in one step: calls and bytes by collective, mesh axes and graph.

``payload`` is the size of the larger side of the collective (the gathered tensor, the tensor to be
reduced). ``sent`` is what each rank sends if the collective runs as a ring over its group of n:
2(n-1)/n of the payload for an all-reduce, (n-1)/n for the others.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from meshwright.compiler.analysis.storage import tensor_bytes
from meshwright.compiler.graph import collectives
from meshwright.compiler.graph.rank_program import LocalGraph, RankProgram
from meshwright.compiler.mesh import Mesh

_KINDS = {
    collectives.all_reduce: "all-reduce",
    collectives.all_gather: "all-gather",
    collectives.reduce_scatter: "reduce-scatter",
    collectives.all_to_all: "all-to-all",
}


@dataclass(frozen=True)
class Traffic:
    """The collectives of one kind over the same mesh axes in one graph, over a whole step."""

    graph: str
    kind: str
    axes: tuple[str, ...]
    calls: int
    payload: int
    sent: int


def communication(rank_program: RankProgram) -> list[Traffic]:
    """All traffic of a rank in one step, in the order in which it first occurs; ``micro`` counts for every microbatch."""
    graphs = (
        ("prologue", rank_program.prologue, 1),
        ("micro", rank_program.micro, rank_program.plan.microbatches),
        ("update", rank_program.update, 1),
    )
    return [
        Traffic(name, kind, axes, times * calls, times * payload, times * sent)
        for name, graph, times in graphs
        for (kind, axes), (calls, payload, sent) in graph_traffic(graph, rank_program.mesh).items()
    ]


def graph_traffic(graph: LocalGraph, mesh: Mesh) -> dict[tuple[str, tuple[str, ...]], tuple[int, int, int]]:
    """``(calls, payload, sent)`` of one run of a graph, by kind and axes."""
    found: dict[tuple[str, tuple[str, ...]], tuple[int, int, int]] = {}
    for node in graph.module.graph.nodes:
        for kind, axes, payload in _calls(node):
            n = mesh.size(*axes)
            if n == 1:
                continue
            sent = payload * (n - 1) * (2 if kind == "all-reduce" else 1) // n
            before = found.get((kind, axes), (0, 0, 0))
            found[kind, axes] = (before[0] + 1, before[1] + payload, before[2] + sent)
    return found


def _calls(node: fx.Node) -> list[tuple[str, tuple[str, ...], int]]:
    """The collectives that a node makes, each with its payload."""
    kind = _KINDS.get(node.target) if callable(node.target) else None
    if kind is None:
        return []
    arguments = dict(zip(_PARAMETERS[kind], node.args, strict=False)) | node.kwargs
    axes = arguments["axes"] if "axes" in arguments else (arguments["axis"],)
    own = sum(tensor_bytes(node))
    given = sum(tensor_bytes(node.all_input_nodes[0]))
    payload = own if kind in ("all-gather", "all-reduce") else given
    # the logarithm of a sum of exponentials reduces a maximum first (collectives.all_reduce)
    times = 2 if arguments.get("reduction") == "logsumexp" else 1
    return [(kind, tuple(axes), payload)] * times


_PARAMETERS = {
    "all-reduce": ("x", "axes", "reduction"),
    "all-gather": ("x", "dim", "axes", "size"),
    "reduce-scatter": ("x", "dim", "axes"),
    "all-to-all": ("x", "split", "join", "axis", "size"),
}
