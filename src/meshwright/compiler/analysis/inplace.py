"""How ``update`` is run: one parameter after the other, each written as soon as it is known.

The captured ``update`` is functional: it returns all new values at once, so old and new ones of the whole model would
live together. It is run in an order in which one parameter is finished after the other; ops write over operands
that nothing reads any more; new values that are not in place by then are copied into the old ones once nothing
reads those. The order is the same on every rank, since every rank has the same program.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from torch import fx

from meshwright.compiler.analysis.reuse import Memory
from meshwright.compiler.graph.order import in_order_of_goals
from meshwright.compiler.graph.program import Value
from meshwright.compiler.graph.rank_program import LocalGraph

MUTABLE = ("parameter", "state")


@dataclass(frozen=True)
class InPlace:
    """``order`` has all nodes that are run, inputs first."""

    order: tuple[fx.Node, ...]
    reused: frozenset[fx.Node]
    """Nodes whose op writes over its first operand."""
    written_back: Mapping[fx.Node, tuple[tuple[fx.Node, fx.Node], ...]]
    """After a node: the inputs that are overwritten then, each with its new value."""
    kept: frozenset[fx.Node]
    """Values that live in the memory of something that is overwritten, and are copied out as soon as they are made."""
    returned: Mapping[Value, fx.Node]
    """The outputs that are not written into an input (norm, results)."""


def in_place(graph: LocalGraph, frozen: Collection[Value] = ()) -> InPlace:
    """How the update graph is run; the graph is left as it is. ``frozen`` inputs are never written over, since another
    graph will read them: their new values are returned."""
    placeholders = [n for n in graph.module.graph.nodes if n.op == "placeholder"]
    old = dict(zip(graph.signature.inputs, placeholders, strict=True))
    (output,) = graph.module.graph.find_nodes(op="output")
    new = dict(zip(graph.signature.outputs, output.args[0], strict=True))
    mine = {v for v in new if v.kind in MUTABLE and v in old and v not in frozen}
    written = {v: n for v, n in new.items() if v in mine and n is not old[v]}
    returned = {v: n for v, n in new.items() if v not in mine}
    order = order_of(graph)
    targets = {old[v] for v in written}
    writable = targets | {n for v, n in old.items() if v.kind == "gradient" and v not in frozen}
    memory = Memory(order, writable, {*written.values(), *returned.values()})
    done = {n for v, n in written.items() if memory.written.get(n) is old[v]}

    # a value that lives in the memory of something else that is written is copied out while it still holds
    kept = {n for n in (*written.values(), *returned.values()) if n not in done and memory.owners[n] & targets}
    due: dict[fx.Node, list[tuple[fx.Node, fx.Node]]] = {}
    position = {n: i for i, n in enumerate(order)}
    last = dict.fromkeys(targets, 0)
    for node in order:
        read = max((position[u] for u in node.users if u in position), default=0)
        for target in memory.owners[node] & targets:
            last[target] = max(last[target], position[node], read)
    for value, node in written.items():
        if node not in done:
            after = order[max(position[node], last[old[value]])]
            due.setdefault(after, []).append((old[value], node))
    written_back = {after: tuple(pairs) for after, pairs in due.items()}
    return InPlace(tuple(order), frozenset(memory.reused), written_back, frozenset(kept), returned)


def order_of(graph: LocalGraph, first: Iterable[fx.Node] = ()) -> list[fx.Node]:
    """The nodes of an update one parameter after the other; before them the inputs, ``first``, and what is returned
    (the norm)."""
    placeholders = [n for n in graph.module.graph.nodes if n.op == "placeholder"]
    (output,) = graph.module.graph.find_nodes(op="output")
    new = dict(zip(graph.signature.outputs, output.args[0], strict=True))
    changed = {v: n for v, n in new.items() if v.kind in MUTABLE and isinstance(n, fx.Node)}
    returned = [n for v, n in new.items() if v.kind not in MUTABLE and isinstance(n, fx.Node)]
    goals = [*first, *returned, *_one_parameter_after_the_other(changed)]
    return in_order_of_goals(graph.module.graph, placeholders, goals)


def _one_parameter_after_the_other(written: Mapping[Value, fx.Node]) -> list[fx.Node]:
    """The new values grouped by parameter, state first."""
    groups: dict[str, list[fx.Node]] = {}
    for kind in reversed(MUTABLE):
        for value, node in written.items():
            if value.kind == kind:
                groups.setdefault(value.name.partition("/")[0], []).append(node)
    return [node for group in groups.values() for node in group]
