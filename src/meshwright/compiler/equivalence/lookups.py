"""Where a step reads a table by integers: of the batch they can be drawn for a smaller table, any others cannot."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import fx

from meshwright.compiler.graph.calls import operand_nodes
from meshwright.compiler.graph.program import Value
from meshwright.compiler.rules.rule import OpCall

INDEX = {"embedding": 1, "embedding_backward": 1, "pick": 1, "cross_entropy": 1, "cross_entropy_backward": 2}
"""Ops that read a table, by the operand that says where."""
COUNTS = frozenset("arange cumsum sort topk argmax argmin".split())
"""Ops that make places of their own."""


@dataclass(frozen=True)
class Lookup:
    """A read of a table; ``batch`` are the tensors of the batch that say where, None if anything else does."""

    batch: tuple[str, ...] | None


def lookup_of(node: fx.Node, call: OpCall, roles: Mapping[fx.Node, Value]) -> Lookup | None:
    """The read of a table that a node is; None if it is none."""
    at = INDEX.get(call.name.split(".")[1])
    if at is None:
        return None
    names: list[str] = []
    for source in _above(operand_nodes(node)[at]):
        if source.op == "placeholder" and roles[source].kind == "batch":
            names.append(roles[source].name)
        elif source.op == "placeholder" or _counts(source):
            return Lookup(None)
    return Lookup(tuple(names) or None)


def ignored(graph: fx.Graph, roles: Mapping[fx.Node, Value]) -> dict[str, int]:
    """By tensor of the batch: the negative number that its elements are compared with, which marks what counts not."""
    found: dict[str, int] = {}
    for node in graph.nodes:
        name = str(node.target)
        if not (name.startswith(("aten.ne.Scalar", "aten.eq.Scalar")) and len(node.args) > 1):
            continue
        number = node.args[1]
        if isinstance(number, int) and number < 0 and isinstance(node.args[0], fx.Node):
            for source in _above(node.args[0]):
                if source.op == "placeholder" and roles[source].kind == "batch":
                    found[roles[source].name] = number
    return found


def tokens(graph: fx.Graph, roles: Mapping[fx.Node, Value]) -> set[str]:
    """The tensors of the batch by which an embedding is read: all of their elements must be in the table."""
    found: set[str] = set()
    for node in graph.nodes:
        if str(node.target).startswith("meshwright.embedding"):
            above = (n for n in _above(operand_nodes(node)[1]) if n.op == "placeholder")
            found |= {roles[n].name for n in above if roles[n].kind == "batch"}
    return found


def _counts(node: fx.Node) -> bool:
    return (
        node.op == "call_function"
        and str(node.target).split(".")[1:2] != []
        and (str(node.target).split(".")[1] in COUNTS)
    )


def _above(node: fx.Node) -> Iterator[fx.Node]:
    seen = {node}
    waiting = [node]
    while waiting:
        at = waiting.pop()
        yield at
        fresh = [n for n in at.all_input_nodes if n not in seen]
        seen.update(fresh)
        waiting += fresh
