"""A graph as the search for findings looks at it: with the roles of its inputs and outputs, and the user's lines."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import fx

from meshwright.compiler.diagnostics import Origin
from meshwright.compiler.graph.program import Graph, Value, annotation
from meshwright.compiler.graph.rank_program import LocalGraph

DEPTH = 60
"""How far back the line of a node is looked for."""


@dataclass(frozen=True)
class Gradient:
    """How the gradient of a parameter was made."""

    line: Origin
    """The user's, of the op whose gradient it is."""
    summed: str
    """The half precision dtype to which it was rounded after a sum over ranks; empty if it was not."""


@dataclass(frozen=True)
class Looked:
    """A graph that is looked at."""

    name: str
    graph: fx.Graph
    inputs: Mapping[fx.Node, Value]
    outputs: Mapping[Value, fx.Node]
    made: Mapping[str, Gradient]
    """By parameter, what other graphs have made its gradient of."""

    def origin(self, node: fx.Node) -> Origin:
        """The user's line of a node, or of what it is computed from."""
        at = node
        for _ in range(DEPTH):
            origin = annotation(at).origin
            gradient = self.gradient(at)
            if gradient is not None:
                return gradient.line
            if origin.file or not at.all_input_nodes:
                return origin
            at = at.all_input_nodes[0]
        return annotation(node).origin

    def gradient(self, node: fx.Node) -> Gradient | None:
        """How an input was made that is a gradient."""
        value = self.inputs.get(node)
        return self.made.get(value.name) if value is not None and value.kind == "gradient" else None


def looked_at(name: str, graph: Graph | LocalGraph, made: Mapping[str, Gradient] | None = None) -> Looked:
    """``made`` says by parameter how its gradient was made."""
    nodes = list(graph.module.graph.nodes)
    inputs = dict(zip((n for n in nodes if n.op == "placeholder"), graph.signature.inputs, strict=True))
    outputs = zip(graph.signature.outputs, nodes[-1].args[0], strict=True)
    given = {value: node for value, node in outputs if isinstance(node, fx.Node)}
    return Looked(name, graph.module.graph, inputs, given, made or {})
