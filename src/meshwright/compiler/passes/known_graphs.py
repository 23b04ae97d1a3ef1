"""Graphs that have been compiled: candidates of a search share those that do not depend on where they differ."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field

from torch import fx

from meshwright.compiler.graph.program import Graph
from meshwright.compiler.graph.rank_program import LocalGraph
from meshwright.compiler.mesh import Mesh
from meshwright.compiler.passes.placement import Placement
from meshwright.compiler.passes.recompute import recompute
from meshwright.compiler.plan import Recompute


@dataclass
class KnownGraphs:
    """What one program's graphs have become. The rank programs that share them must leave them as they are."""

    _locals: dict[Hashable, LocalGraph] = field(default_factory=dict)
    _recomputed: dict[Hashable, Graph] = field(default_factory=dict)
    _kept: list[fx.GraphModule] = field(default_factory=list)
    """The graphs that keys name by identity, so that they live as long."""

    def recomputed(self, graph: Graph, entries: Sequence[Recompute]) -> Graph:
        """The graph with values computed again; the same object for the same entries."""
        key = (id(graph.module), tuple(entries))
        if key not in self._recomputed:
            self._kept.append(graph.module)
            self._recomputed[key] = recompute(graph, entries)
        return self._recomputed[key]

    def local(
        self, graph: Graph, mesh: Mesh, placement: Placement, options: Hashable, make: Callable[[], LocalGraph]
    ) -> LocalGraph:
        """The local form of a graph, made where it is not known. ``options``: what else it depends on."""
        key = (id(graph.module), mesh, _key(placement), options)
        if key not in self._locals:
            self._kept.append(graph.module)
            self._locals[key] = make()
        return self._locals[key]


def _key(placement: Placement) -> Hashable:
    """All that a placement says, as something to compare; the order of what it says does not count."""
    maps = (
        placement.inputs,
        placement.outputs,
        placement.storage,
        placement.wanted,
        placement.early,
        placement.pays,
    )
    return placement.may_owe, tuple(frozenset(m.items()) for m in maps)
