"""Verify that every owed sum of a propagated graph is paid exactly once.

The check derives anew, from the rules and the operands as they stand in the graph, what each result
must owe, and compares it with what propagation wrote. It shares no code with the decision.
"""

from __future__ import annotations

import operator

from torch import fx

from meshwright.compiler.diagnostics import InternalError
from meshwright.compiler.graph.calls import operand_nodes
from meshwright.compiler.graph.program import Graph, annotation
from meshwright.compiler.graph.redistribute import moves, redistribute
from meshwright.compiler.mesh import Mesh, Sharding, split
from meshwright.compiler.passes.placement import DECISION, Chosen

Owed = frozenset[tuple[str, str]]


def verify_owed(graph: Graph, mesh: Mesh) -> None:
    """Raises InternalError that names the first node whose owed sums are lost, invented or read unpaid."""
    for node in graph.module.graph.nodes:
        if node.op != "call_function" or node.target is operator.getitem:
            continue
        if node.target is redistribute:
            _check_move(node)
            continue
        chosen = node.meta.get(DECISION)
        if isinstance(chosen, Chosen):
            _check_op(node, chosen, mesh)


def _check_move(node: fx.Node) -> None:
    value, source, target = moves(node)
    held = annotation(value).sharding
    if held is not None and held.partial != source.partial:
        raise InternalError(f"verify_owed: {node} pays {source.partial} of a value that owes {held.partial}")
    for axis, reduction in target.partial - source.partial:
        if reduction != "sum" or axis in source.axes or axis in source.owed:
            raise InternalError(f"verify_owed: {node} makes a value owe {reduction} over {axis} that {source} does not")


def _check_op(node: fx.Node, chosen: Chosen, mesh: Mesh) -> None:
    rule = chosen.rule
    if node.target.__class__.__name__ == "OpOverload" and "total" in str(node.target):
        owed = [annotation(n).sharding for n in operand_nodes(node)]
        if len({s.partial for s in owed if s is not None}) > 1:
            raise InternalError(f"verify_owed: {node} adds scalars that owe different sums")
        return
    shardings = [annotation(n).sharding or Sharding(()) for n in operand_nodes(node)]
    for axis in mesh.names:
        owing = {i for i, s in enumerate(shardings) if axis in s.owed and i not in rule.unread}
        cut = {f for i, s in enumerate(shardings) for f in _cut_factors(rule.operands[i], s, axis, chosen, mesh)}
        if owing and cut:
            raise InternalError(f"verify_owed: {node} reads a sum owed over {axis}, by which it also cuts {cut}")
        if owing and owing not in [set(g) for g in rule.linear]:
            raise InternalError(
                f"verify_owed: {node} reads a sum owed over {axis} and is not linear in operands {owing}"
            )
        for dims, result in zip(rule.results, chosen.decision.results, strict=True):
            if dims is None or result is None:
                continue
            present = {f for factors in dims for f in factors}
            reduced = cut - present
            expected = {"sum"} if owing else {rule.reduce[f] for f in reduced if f in rule.reduce}
            masked = {f for f in rule.masked if axis in _axes(chosen, f)} - present
            expected |= {"sum"} if masked else set()
            found = {op for a, op in result.partial if a == axis}
            if found != expected:
                raise InternalError(
                    f"verify_owed: {node} must owe {expected or 'nothing'} over {axis}, but owes {found}"
                )


def _axes(chosen: Chosen, factor: str) -> set[str]:
    return {a for s in chosen.decision.segments.get(factor, ()) for a in s.axes}


def _cut_factors(
    dims: tuple[tuple[str, ...], ...], sharding: Sharding, axis: str, chosen: Chosen, mesh: Mesh
) -> set[str]:
    found = set()
    for factors, dim in zip(dims, sharding.dims, strict=True):
        if not any(axis in s.axes for s in dim):
            continue
        parts = split(dim, tuple(chosen.rule.sizes[f] for f in factors), mesh)
        if parts is None:
            raise InternalError(f"verify_owed: {sharding} is cut by {axis} across the border of {factors}")
        found |= {f for f, part in zip(factors, parts, strict=True) if any(axis in s.axes for s in part)}
    return found
