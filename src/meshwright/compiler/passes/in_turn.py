"""Put an update into the order in which it is run: one parameter after the other.

The optimizer is traced op by op over all parameters. If its nodes stood so, messages of one block would be spread over
the whole update, and what has begun would be waited for only when everything has begun.
"""

from __future__ import annotations

from torch import fx

from meshwright.compiler.analysis.inplace import order_of
from meshwright.compiler.analysis.kinds import copies
from meshwright.compiler.graph.functions import COLLECTIVES
from meshwright.compiler.graph.rank_program import LocalGraph


def in_turn(local: LocalGraph) -> LocalGraph:
    """The same graph with its nodes in that order; a graph that updates no parameter stays as it is."""
    if not any(value.kind == "parameter" for value in local.signature.outputs):
        return local
    (output,) = local.module.graph.find_nodes(op="output")
    for node in order_of(local, _moved_inputs(local.module.graph)):
        if node.op != "placeholder":
            output.prepend(node)
    local.module.graph.lint()
    local.module.recompile()
    return local


def _moved_inputs(graph: fx.Graph) -> list[fx.Node]:
    """Inputs that are sent, and what is sent of them, first what is sent first: so like messages stand together."""
    functions = set(COLLECTIVES.values())
    sent: dict[fx.Node, int] = {}
    for node in graph.nodes:
        sources = node.all_input_nodes
        free = bool(sources) and (node.target in functions or copies(node))
        if free and all(n.op == "placeholder" or n in sent for n in sources):
            before = max(sent.get(n, 0) for n in sources)
            sent[node] = before + (sources[0].target in functions)
    # casts and views of what has come are made where they are read
    needed: set[fx.Node] = set()
    for node in reversed(sent):
        if node.target in functions or any(user in needed for user in node.users):
            needed.add(node)
    return sorted((n for n in sent if n in needed), key=lambda n: sent[n])
