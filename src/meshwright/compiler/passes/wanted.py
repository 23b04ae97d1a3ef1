"""What the outputs want, carried back to where values are made.

A gradient of an embedding cut along its vocabulary must be made in shards, though nothing it is
computed from is cut that way. So the cut of a gradient is carried backward through casts, views
and sums to the op that makes it.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import fx

from meshwright.compiler.graph.calls import op_call, operand_nodes
from meshwright.compiler.graph.program import Graph, Value
from meshwright.compiler.mesh import Dim, Mesh, Segment, Sharding, split
from meshwright.compiler.rules import rule_of
from meshwright.compiler.rules.rule import Dims, Rule


def wanted_shardings(
    graph: Graph, mesh: Mesh, outputs: Mapping[Value, Sharding]
) -> dict[fx.Node, tuple[Sharding | None, ...]]:
    """For nodes that lead to an output by casts, views and sums alone: the sharding of their results."""
    wanted: dict[fx.Node, Sharding] = {}
    for value, node in graph.outputs().items():
        if value in outputs and isinstance(node, fx.Node):
            wanted.setdefault(node, outputs[value].paid())
    for node in reversed(graph.module.graph.nodes):
        call = op_call(node) if node in wanted else None
        rule = rule_of(call) if call is not None else None
        if rule is None or rule.reduce or rule.masked or len(rule.results) != 1 or rule.results[0] is None:
            continue
        for source, dims in zip(operand_nodes(node), rule.operands, strict=True):
            back = _carry(rule, rule.results[0], dims, wanted[node], mesh)
            if back is not None and len(source.users) == 1:
                wanted.setdefault(source, back)
    return {node: (sharding,) for node, sharding in wanted.items()}


def _carry(rule: Rule, result: Dims, operand: Dims, sharding: Sharding, mesh: Mesh) -> Sharding | None:
    parts: dict[str, Dim] = {}
    for factors, dim in zip(result, sharding.dims, strict=True):
        found = split(dim, tuple(rule.sizes[f] for f in factors), mesh)
        if found is None:
            return None
        parts.update(zip(factors, found, strict=True))
    if any(f not in parts for factors in operand for f in factors):
        return None
    return Sharding(tuple(tuple(s for f in factors for s in parts[f]) or (Segment(1),) for factors in operand))
