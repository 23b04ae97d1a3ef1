"""Which nodes of a graph belong to which repeated region, in a form in which equal regions look equal.

Capture gives every node the block that made it. That is not yet enough to compare blocks: what is computed once and
read by all blocks stands in the first one, and where the gradient of a shared value is summed over blocks, the
additions stand in all of them but one. Here both are taken out: a value that other regions read and that needs no
weight is *hoisted*, it belongs to no region; and so do the additions of a *sum over regions*, to which a region then
gives terms.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from meshwright.compiler.graph.calls import overload
from meshwright.compiler.graph.program import Graph, Value

WEIGHTS = ("parameter", "gradient", "state")


@dataclass
class Regions:
    """A graph and the region of its nodes; nodes that are not in ``of`` belong to none."""

    graph: Graph
    of: dict[fx.Node, str]
    """Calls, and placeholders that one region alone reads."""
    roles: dict[fx.Node, Value]
    results: dict[fx.Node, list[Value]]
    """What a node is as an output of the graph."""
    sums: set[fx.Node] = field(default_factory=set)
    """Additions of sums over regions."""


def find_regions(graph: Graph, region: Callable[[fx.Node], str]) -> Regions:
    """The regions of a graph; ``region`` says where a call was made, "" outside."""
    roles = {node: value for value, node in graph.placeholders().items()}
    results: dict[fx.Node, list[Value]] = {}
    for value, node in graph.outputs().items():
        if isinstance(node, fx.Node):
            results.setdefault(node, []).append(value)
    calls = [n for n in graph.module.graph.nodes if n.op == "call_function"]
    of = {n: found for n in calls if (found := region(n))}
    for node in _hoisted(calls, of, roles):
        del of[node]
    found_regions = Regions(graph, of, roles, results, _sums_over_regions(calls, of, results))
    for node in found_regions.sums:
        of.pop(node, None)
    for node in roles:
        readers = {of.get(user, "") for user in node.users}
        if len(readers) == 1 and "" not in readers:
            of[node] = readers.pop()
    return found_regions


def _hoisted(calls: list[fx.Node], of: dict[fx.Node, str], roles: dict[fx.Node, Value]) -> set[fx.Node]:
    """Values that other regions read and that are made without weights; and what they are made of."""
    free: set[fx.Node] = set()
    for node in calls:
        if node in of and all(
            source in free if source in of else source not in roles or roles[source].kind not in WEIGHTS
            for source in node.all_input_nodes
        ):
            free.add(node)
    found: set[fx.Node] = set()
    for node in reversed(calls):
        if node in free and any(user in found or (user in of and of[user] != of[node]) for user in node.users):
            found.add(node)
    return found


def _sums_over_regions(
    calls: list[fx.Node], of: dict[fx.Node, str], results: dict[fx.Node, list[Value]]
) -> set[fx.Node]:
    """Trees of additions whose inner values nothing else reads and which stand in more than one region.

    A stream from block to block is none: what a block adds to is read by the block as well.
    """
    root: dict[fx.Node, fx.Node] = {}
    trees: dict[fx.Node, list[fx.Node]] = {}
    for node in reversed(calls):
        if not is_plain_sum(node):
            continue
        users = list(node.users)
        inner = len(users) == 1 and users[0] in root and node not in results
        root[node] = root[users[0]] if inner else node
        trees.setdefault(root[node], []).append(node)
    found = {n for tree in trees.values() if len({of[n] for n in tree if n in of}) > 1 for n in tree}
    return found | {n for n in calls if is_total(n)}


def is_plain_sum(node: fx.Node) -> bool:
    """Whether the node adds two tensors of one type, as they are."""
    if node.target is not torch.ops.aten.add.Tensor or node.kwargs.get("alpha", 1) != 1 or len(node.args) != 2:
        return False
    types = {type_of(a) if isinstance(a, fx.Node) else a for a in (node, *node.args)}
    return len(types) == 1 and None not in types


def is_total(node: fx.Node) -> bool:
    """Whether the node is the total of a list of scalars."""
    return node.target is overload("meshwright.total.default")


def type_of(node: fx.Node) -> Any:
    """Shape and dtype of a value, as something to compare."""
    return _type(node.meta.get("val"))


def _type(value: Any) -> Any:
    if isinstance(value, Tensor):
        return (*value.shape, value.dtype)
    if isinstance(value, (list, tuple)):
        return tuple(_type(v) for v in value)
    return None
