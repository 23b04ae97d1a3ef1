"""The buffers of a graph: every piece of memory with the items from which to which it lives."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

from torch import fx

from meshwright.compiler.analysis.inplace import InPlace
from meshwright.compiler.analysis.kinds import storage_kinds
from meshwright.compiler.analysis.storage import Storages, last_reads
from meshwright.compiler.graph.program import Value, annotation
from meshwright.compiler.graph.rank_program import LocalGraph
from meshwright.compiler.mesh import MICRO
from meshwright.compiler.summary import Buffer

_ELSEWHERE = ("parameter", "state", "buffer", "constant")
"""Inputs that are held throughout and counted apart, once for all graphs."""


def nodes_of(graph: LocalGraph) -> list[fx.Node]:
    """All nodes but the output."""
    return [n for n in graph.module.graph.nodes if n.op != "output"]


def roles(graph: LocalGraph) -> tuple[dict[fx.Node, Value], dict[Value, fx.Node]]:
    """The roles of inputs, and the nodes of outputs (without those that are None)."""
    nodes = list(graph.module.graph.nodes)
    inputs = dict(zip((n for n in nodes if n.op == "placeholder"), graph.signature.inputs, strict=True))
    outputs = zip(graph.signature.outputs, nodes[-1].args[0], strict=True)
    return inputs, {value: node for value, node in outputs if isinstance(node, fx.Node)}


def deposited(micro: LocalGraph) -> dict[int, fx.Node]:
    """The gradients that several microbatches add up: each goes to its accumulator as soon as it is made. By position
    among the outputs."""
    nodes = list(micro.module.graph.nodes)
    found = {}
    for position, (value, node) in enumerate(zip(micro.signature.outputs, nodes[-1].args[0], strict=True)):
        made = isinstance(node, fx.Node) and node.op == "call_function"
        if made and value.kind == "gradient" and (MICRO, "sum") in micro.outputs[value].partial:
            found[position] = node
    return found


def buffers(
    graph: LocalGraph,
    order: Sequence[fx.Node],
    memory: Storages,
    places: Mapping[fx.Node, tuple[int, int]],
    end: int,
    update: InPlace | None = None,
    passed_on: Collection[fx.Node] = (),
) -> Iterator[Buffer]:
    """The buffers of a graph whose nodes run in ``order``; ``places`` has the first and last item of each node.

    ``update``: how an update writes over its inputs, whose gradients are then released one by one; the caller holds the
    inputs of the other graphs to the end, and all outputs but those that are ``passed_on`` as soon as they are made.
    """
    inputs, outputs = roles(graph)
    owned = memory.owned
    last = last_reads(order, owned)
    for position, node in enumerate(order):
        for _, source in update.written_back.get(node, ()) if update else ():
            last.update({s: max(last[s], position) for s in owned[source]})
    returned = update.returned if update else outputs
    stay = {s for node in returned.values() if node not in passed_on for s in owned.get(node, ())}
    kinds = storage_kinds(order, owned, inputs, outputs)
    for storage, position in last.items():
        node = storage.node
        value = inputs.get(node)
        if value is not None and value.kind in _ELSEWHERE and MICRO not in graph.inputs[value].axes:
            continue
        if value is not None and value.kind == "prologue":
            continue  # a part of what the prologue returned
        held = value is not None and not (update and value.kind == "gradient")
        dies = end if held or storage in stay else max(places[order[position]][1], 0)
        note = annotation(node)
        block = note.block
        if value is not None and value.kind == "gradient":
            block = next((annotation(u).block for u in node.users if annotation(u).block), block)
        born = places[node][0]
        if node in memory.sent and storage.index >= 0:
            born = min(born + memory.sent[node].since[storage.index], places[node][1])
        yield Buffer(storage.bytes, kinds[storage], born, dies, note.phase, block, node.name)
