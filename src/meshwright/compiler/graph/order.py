"""The order in which an update is run: one goal after the other, each with what it needs."""

from __future__ import annotations

from collections.abc import Iterable

from torch import fx

from meshwright.compiler.graph import collectives


def in_order_of_goals(graph: fx.Graph, first: Iterable[fx.Node], goals: Iterable[fx.Node]) -> list[fx.Node]:
    """All of ``first``, then what each goal needs, in turn, in the order of the graph's dependencies.

    Messages begin in the order of the graph, and what begins before another is waited for there does so here too.
    """
    earlier: dict[fx.Node, list[fx.Node]] = {}
    begun: list[fx.Node] = []
    for node in graph.nodes:
        if node.target is collectives.wait or node.target in collectives.BEGINS:
            earlier[node] = list(begun)
        if node.target in collectives.BEGINS:
            begun.append(node)
    done: dict[fx.Node, None] = dict.fromkeys(first)
    for goal in goals:
        stack = [goal]
        while stack:
            node = stack[-1]
            missing = [n for n in (*earlier.get(node, ()), *node.all_input_nodes) if n not in done]
            if node in done or not missing:
                done.setdefault(stack.pop())
            else:
                stack.extend(reversed(missing))
    return list(done)
