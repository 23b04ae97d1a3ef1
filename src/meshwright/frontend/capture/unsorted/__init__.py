"""Sorting taken out of a step where it only says in which order rows are computed.

A mixture of experts that drops nothing sorts its rows by expert, so that each expert finds its own side by side,
computes row by row, and puts the rows back. What a row gets does not depend on where it stood, so the step is the same
without the sort, rows in the order of their tokens and products by :mod:`meshwright.compiler.graph.ops.routed`, whose
kernel sorts the rows that it is given. So written, the step can be cut over its batch by the rules of its ops.

This holds by equalities of single ops. Where one does anything with sorted rows that depends on their places (a
capacity, a slice, a cumulated sum), the sort stays, and with it the coupling that it is. ``compiler/causality`` tells
by the same coordinates which values of a model's run depend on which; here they say how nodes are to be written.
"""

from __future__ import annotations

from torch import fx

from meshwright.frontend.capture.tidy import remove_dead, tidy
from meshwright.frontend.capture.unsorted.follow import Follow
from meshwright.frontend.capture.unsorted.writer import Writer

__all__ = ["unsort"]


def unsort(module: fx.GraphModule) -> None:
    """Take out of a joint graph, in place, every sort of which only the order of rows is used."""
    graph = module.graph
    stays: set[fx.Node] = set()
    while True:
        found = Follow(graph, frozenset(stays))
        found.run()
        if not found.lost:
            break
        stays |= found.lost
    if not found.builds:
        return
    writer = Writer(graph)
    for node in list(graph.nodes):
        build = found.builds.get(node)
        if build is None:
            continue
        made = writer.build(node, build)
        if all(state is None for state in found.states[node]):
            node.replace_all_uses_with(made)
    remove_dead(graph)
    tidy(module)
