"""Take a graph apart into the passes of its stages, each a graph of its own.

A piece has as inputs what the graph has, and the values that other pieces make; what others need it returns. A value
that belongs to no stage is made in the first piece of each stage that reads it, or in each of them if it is of weights
alone.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from meshwright.compiler.graph.adapter import graph_module
from meshwright.compiler.graph.program import Signature, Value, annotation
from meshwright.compiler.graph.rank_program import LocalGraph
from meshwright.compiler.mesh import Sharding
from meshwright.compiler.passes.stages import Assigned

ORDER: tuple[str, ...] = ("F", "I", "W")
"""The passes of ``micro``, as they come one after the other."""
Place = tuple[int, Any]
"""A stage, and its pass or round."""


@dataclass
class Piece:
    """One pass of one stage. Values that other pieces make have the kind ``value`` and the name of their node."""

    graph: LocalGraph
    origin: Mapping[str, Place] = field(default_factory=dict)
    """By value that comes in: the piece that makes it."""


def split(local: LocalGraph, assigned: Assigned, order: Sequence[Hashable] = ORDER) -> dict[Place, Piece]:
    """All pieces; those that have nothing to do are empty graphs."""
    graph = local.module.graph
    roles = dict(zip(graph.find_nodes(op="placeholder"), local.signature.inputs, strict=True))
    (output,) = graph.find_nodes(op="output")
    results: dict[fx.Node, list[Value]] = {}
    for value, node in zip(local.signature.outputs, output.args[0], strict=True):
        if isinstance(node, fx.Node):
            results.setdefault(node, []).append(value)
    places = [(s, p) for s in range(assigned.stages) for p in order]
    members = _members(graph, assigned, order)
    made: dict[fx.Node, list[Place]] = {}
    for place in places:
        for node in members[place]:
            made.setdefault(node, []).append(place)
    reads = {place: list(_reads(members[place])) for place in places}
    # an input that belongs to another stage comes from there
    own = {node: (place[0], order[0]) for node, place in assigned.of.items() if node in roles}
    made |= {node: [place] for node, place in own.items()}
    source = {
        (place, node): _source(place, node, made)
        for place in places
        for node in reads[place]
        if node not in roles or (node in own and own[node][0] != place[0])
    }
    leaving: dict[Place, dict[fx.Node, None]] = {place: {} for place in places}
    for (_, node), origin in source.items():
        leaving[origin][node] = None
    for place in places:
        reads[place] += [node for node in leaving[place] if node in roles and node not in reads[place]]
    return {
        place: _piece(local, place, members[place], reads[place], leaving[place], roles, results, source, made)
        for place in places
    }


def _members(graph: fx.Graph, assigned: Assigned, order: Sequence[Hashable]) -> dict[Place, dict[fx.Node, None]]:
    """The nodes of each piece: its own, and what belongs to no stage where it is first needed; results that belong to
    none are made at the end."""
    nodes = [n for n in graph.nodes if n.op == "call_function"]
    own: dict[Place, set[fx.Node]] = {(s, p): set() for s in range(assigned.stages) for p in order}
    for node, place in assigned.of.items():
        if node.op == "call_function":
            own[place].add(node)
    final = own[assigned.stages - 1, order[-1]]
    final |= {n for n in nodes if n not in assigned.of and any(user.op == "output" for user in n.users)}
    for stage in range(assigned.stages):
        there: set[fx.Node] = set()
        for each in order:
            mine = own[stage, each]
            for node in reversed(nodes):
                if node not in assigned.of and node not in there and any(u in mine for u in node.users):
                    mine.add(node)
            there |= mine - assigned.again
    return {place: {n: None for n in nodes if n in mine} for place, mine in own.items()}


def _reads(members: Mapping[fx.Node, None]) -> Iterator[fx.Node]:
    """What comes into a piece, each once."""
    seen: set[fx.Node] = set()
    for node in members:
        for other in node.all_input_nodes:
            if other not in members and other not in seen:
                seen.add(other)
                yield other


def _source(place: Place, node: fx.Node, made: Mapping[fx.Node, list[Place]]) -> Place:
    """The piece that a value comes from: one of the same stage if there is one."""
    origins = made[node]
    return next((o for o in origins if o[0] == place[0]), origins[0])


def _piece(
    local: LocalGraph,
    place: Place,
    members: Mapping[fx.Node, None],
    reads: list[fx.Node],
    leaving: Mapping[fx.Node, None],
    roles: Mapping[fx.Node, Value],
    results: Mapping[fx.Node, list[Value]],
    source: Mapping[tuple[Place, fx.Node], Place],
    made: Mapping[fx.Node, list[Place]],
) -> Piece:
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    inputs: dict[Value, Sharding] = {}
    for node in reads:
        copies[node] = graph.placeholder(node.name)
        copies[node].meta = dict(node.meta)
        value = Value("value", node.name) if (place, node) in source else roles[node]
        inputs[value] = local.inputs.get(value) or _lies(node)
    for node in members:
        copies[node] = graph.node_copy(node, lambda n: copies[n])
        copies[node].meta = dict(node.meta)
    outputs = [(Value("value", n.name), copies[n], _lies(n)) for n in leaving]
    for node, values in results.items():
        if node in members and made[node][0] == place:
            outputs += [(value, copies[node], local.outputs[value]) for value in values]
    graph.output(tuple(node for _, node, _ in outputs))
    graph.lint()
    signature = Signature(tuple(inputs), tuple(value for value, _, _ in outputs))
    made_graph = LocalGraph(graph_module(local.module, graph), signature, inputs, {v: s for v, _, s in outputs})
    return Piece(made_graph, {n.name: source[place, n] for n in reads if (place, n) in source})


def _lies(node: fx.Node) -> Sharding:
    return annotation(node).sharding or Sharding.whole(annotation(node).shape)
