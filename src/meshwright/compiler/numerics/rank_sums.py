"""The sums over ranks in the graph of a rank: in which dtype, over how many, of what, read by what."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import fx

from meshwright.compiler.graph import collectives
from meshwright.compiler.mesh import Mesh
from meshwright.compiler.numerics.casts import dtype_of, is_view, narrows, shape_of, widens

SUMS = {
    collectives.all_reduce: "all-reduce",
    collectives.reduce_scatter: "reduce-scatter",
    collectives.all_reduce_many: "all-reduce",
    collectives.reduce_scatter_many: "reduce-scatter",
    collectives.all_reduce_begin: "all-reduce",
    collectives.reduce_scatter_begin: "reduce-scatter",
}
"""The functions that add over ranks in the dtype of what they are given, with what each is."""
MOST = 2
"""Ranks over which a sum has one rounding in any case."""


@dataclass(frozen=True)
class RankSum:
    """One tensor that is added over ranks by one node."""

    node: fx.Node
    source: fx.Node
    axes: tuple[str, ...]
    count: int
    """Ranks."""
    kind: str
    """``all-reduce`` or ``reduce-scatter``."""

    @property
    def elements(self) -> int:
        """Of the rank's tensor."""
        return math.prod(shape_of(self.source))


def rank_sums(graph: fx.Graph, mesh: Mesh) -> Iterator[RankSum]:
    """All sums over two or more ranks, in any dtype, message by message and tensor by tensor."""
    for node in graph.nodes:
        kind = SUMS.get(node.target) if node.op == "call_function" else None
        if kind is None or _reduction(node) != "sum":
            continue
        sources: Any = node.args[0]
        axes = _axes(node)
        count = mesh.size(*axes)
        if count > 1:
            for source in sources if isinstance(sources, (list, tuple)) else [sources]:
                yield RankSum(node, source, axes, count, kind)


def narrowed_before(source: fx.Node) -> fx.Node | None:
    """The cast to half precision that a sum's operand is nothing but a view of, if there is one."""
    while is_view(source):
        source = source.all_input_nodes[0]
    if not narrows(source):
        return None
    before: Any = source.args[0]
    # what has just been widened is rounded to itself
    return None if widens(before) and dtype_of(before.args[0]) == dtype_of(source) else source


def _axes(node: fx.Node) -> tuple[str, ...]:
    arguments: tuple[Any, ...] = node.args
    at = 1 if SUMS[node.target] == "all-reduce" else 2  # type: ignore[index]  # a key, as it was looked up before
    return tuple(arguments[at])


def _reduction(node: fx.Node) -> str:
    if SUMS[node.target] != "all-reduce":  # type: ignore[index]  # as above
        return "sum"
    arguments: tuple[Any, ...] = node.args
    return str(arguments[2]) if len(arguments) > 2 else "sum"
