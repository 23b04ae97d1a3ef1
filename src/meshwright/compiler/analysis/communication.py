"""What a rank communicates in one step: calls and bytes by collective, mesh axes and graph.

Every communication op of the graph is run once on fake tensors with a communicator that only takes notes, so
padding, several axes and joined messages are counted as they are sent.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, fx

from meshwright.compiler.graph import collectives
from meshwright.compiler.graph.fake import fake_mode, fake_tensor
from meshwright.compiler.graph.functions import COLLECTIVES
from meshwright.compiler.graph.program import annotation
from meshwright.compiler.graph.rank_program import LocalGraph, RankProgram
from meshwright.compiler.mesh import Mesh


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


def communication(rank_program: RankProgram) -> list[Traffic]:
    """All traffic of a rank in one step; ``micro`` counts once for every microbatch."""
    times = rank_program.plan.microbatches
    mesh = rank_program.mesh.with_micro(times)
    graphs = (
        ("prologue", rank_program.prologue, 1),
        ("micro", rank_program.micro, times),
        ("update", rank_program.update, 1),
    )
    return [
        Traffic(name, t.kind, t.axes, n * t.calls, n * t.payload, n * t.sent)
        for name, graph, n in graphs
        for t in graph_traffic(graph, mesh, name)
    ]


def graph_traffic(graph: LocalGraph, mesh: Mesh, name: str) -> list[Traffic]:
    """The traffic of one run of a graph. ``mesh`` has the ``micro`` axis."""
    notes = _Notes(mesh)
    functions = set(COLLECTIVES.values())
    with fake_mode(), collectives.use(notes), torch.no_grad():
        for node in graph.module.graph.nodes:
            if node.op == "call_function" and node.target in functions:
                args, kwargs = fx.map_arg((node.args, node.kwargs), _stand_in)
                node.target(*args, **kwargs)
    found: dict[tuple[str, tuple[str, ...]], list[int]] = {}
    for kind, axes, payload in notes.taken:
        found.setdefault((kind, axes), []).append(payload)
    return [
        Traffic(name, kind, axes, len(sizes), sum(sizes), sum(sent(kind, size, mesh.size(*axes)) for size in sizes))
        for (kind, axes), sizes in found.items()
    ]


def sent(kind: str, payload: int, ranks: int) -> int:
    """The bytes that each of ``ranks`` sends in a ring."""
    return payload * (ranks - 1) * (2 if kind == "all-reduce" else 1) // ranks


def _stand_in(node: fx.Node) -> Tensor | int:
    note = annotation(node)
    value = node.meta.get("val")
    if isinstance(value, Tensor):
        return fake_tensor(value.shape, value.dtype)
    return fake_tensor(note.shape, note.dtype) if note.dtype is not None else 0


@dataclass
class _Notes:
    """A communicator that sends nothing, answers with the right shapes, and notes what it was asked for."""

    mesh: Mesh
    taken: list[tuple[str, tuple[str, ...], int]] = field(default_factory=list)

    def note(self, kind: str, axes: tuple[str, ...], larger: Tensor) -> Tensor:
        if self.mesh.size(*axes) > 1:
            self.taken.append((kind, tuple(axes), larger.numel() * larger.element_size()))
        return larger

    def coordinate(self, axis: str) -> int:
        return 0

    def all_reduce(self, x: Tensor, axes: tuple[str, ...], reduction: str) -> Tensor:
        return torch.empty_like(self.note("all-reduce", axes, x))

    def all_reduce_all(self, xs: list[Tensor], axes: tuple[str, ...], reduction: str) -> list[Tensor]:
        return [self.all_reduce(x, axes, reduction) for x in xs]

    def all_gather(self, x: Tensor, axes: tuple[str, ...]) -> Tensor:
        return self.note("all-gather", axes, x.new_empty((x.shape[0] * self.mesh.size(*axes), *x.shape[1:])))

    def reduce_scatter(self, x: Tensor, axes: tuple[str, ...]) -> Tensor:
        return self.note("reduce-scatter", axes, x).new_empty((x.shape[0] // self.mesh.size(*axes), *x.shape[1:]))

    def all_to_all(self, x: Tensor, axes: tuple[str, ...]) -> Tensor:
        return torch.empty_like(self.note("all-to-all", axes, x))
