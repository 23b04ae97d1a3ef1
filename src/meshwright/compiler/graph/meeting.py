"""Where microbatches meet: a collective of ``micro`` over the axis of microbatches, which come one after another.

Such a node stands where something that couples samples must be known before any microbatch can go on: a batch
statistic, the product of means of a balance loss, the other samples of a contrastive loss. All microbatches are run up
to it, what they hold is reduced or joined, and each goes on with the result.
"""

from __future__ import annotations

from typing import Any

from torch import fx

from meshwright.compiler.graph import collectives
from meshwright.compiler.mesh import MICRO

_AXES = {
    collectives.all_reduce: 1,
    collectives.all_gather: 2,
    collectives.reduce_scatter: 2,
    collectives.all_to_all: 3,
}
"""The collectives over which microbatches can meet, and which of their arguments names the axes."""


def meets(node: fx.Node) -> bool:
    """Whether all microbatches stop at the node until the last one has come to it."""
    return MICRO in axes_of(node)


def joins(node: fx.Node) -> bool:
    """Whether microbatches get each other's samples at the node, not only a sum over them."""
    return meets(node) and node.target in (collectives.all_gather, collectives.all_to_all)


def axes_of(node: fx.Node) -> tuple[str, ...]:
    """The axes of a collective that is no joined one; none of anything else."""
    target: Any = node.target
    at = _AXES.get(target)
    if at is None or node.op != "call_function":
        return ()
    axes: Any = node.args[at]
    return (axes,) if isinstance(axes, str) else tuple(axes)


def meeting_places(graph: fx.Graph) -> tuple[fx.Node, ...]:
    """The meetings of a graph, in order."""
    return tuple(node for node in graph.nodes if meets(node))
