"""Join small collectives of one block into one message.

A collective has a latency whatever it carries, so the weights of a block are gathered together where
the first of them is needed, and sums are paid together where the last of them is ready. The numbers
stay the same bit for bit, but for the order in which an all-reduce may add its ranks.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from torch import fx

from meshwright.compiler.analysis.free import free_values
from meshwright.compiler.graph import collectives
from meshwright.compiler.graph.meeting import meets
from meshwright.compiler.graph.program import annotation
from meshwright.compiler.graph.rank_program import LocalGraph
from meshwright.compiler.mesh import Mesh, Segment

BYTES = 32 * 2**20
"""The most that one message carries, of local bytes: enough to hide the latency, little beside a block."""
_JOINED = (collectives.all_gather, collectives.reduce_scatter, collectives.reduce_scatter_wide, collectives.all_reduce)
SMALL = 2**20
"""In the update, blocks that send less than so many bytes share messages; others send their own, block by block."""


@dataclass(frozen=True)
class _Key:
    """What the members of a bucket have in common."""

    target: Any
    axes: tuple[str, ...]
    reduction: str
    dtype: Any
    """Of what is sent."""
    rounded: Any
    """The dtype to which wide sums are rounded; None for other collectives."""
    where: tuple[str, str]
    early: bool
    """Placed where the first member stands (weights gathered for use), else where the last one does."""


def bucket(local: LocalGraph, mesh: Mesh, limit: int = BYTES) -> LocalGraph:
    """The same graph with collectives of one kind, block and phase joined. Needs shapes in ``meta["val"]``."""
    graph = local.module.graph
    order = {n: i for i, n in enumerate(graph.nodes)}
    free = free_values(local)
    for key, nodes in _runs(graph.nodes, mesh):
        for members in _buckets(nodes, order, key.early, limit):
            if len(members) > 1:
                _join(graph, key, members, order, free)
    graph.lint()
    local.module.recompile()
    return local


def _runs(nodes: Iterable[fx.Node], mesh: Mesh) -> list[tuple[_Key, list[fx.Node]]]:
    """Collectives of one key; a run ends where another block begins to use the same kind on the same axes."""
    runs: list[tuple[_Key, list[fx.Node]]] = []
    current: dict[tuple[Any, ...], tuple[_Key, list[fx.Node]]] = {}
    keyed = [(node, key) for node in nodes if (key := _key(node, mesh)) is not None]
    sent: Counter[_Key] = Counter()
    for node, key in keyed:
        sent[key] += _bytes(node) if key.target is not collectives.all_gather else _bytes(node) * mesh.size(*key.axes)
    for node, key in keyed:
        if key.where[0] == "update" and sent[key] < SMALL:
            key = replace(key, where=("update", ""))
        kind = (key.target, key.axes, key.reduction, key.dtype, key.rounded, key.early)
        if kind not in current or current[kind][0].where != key.where:
            current[kind] = (key, [])
            runs.append(current[kind])
        current[kind][1].append(node)
    return runs


def _key(node: fx.Node, mesh: Mesh) -> _Key | None:
    if node.target not in _JOINED or meets(node):
        return None
    note = annotation(node)
    source = node.all_input_nodes[0]
    where = (note.phase, note.block)
    dtype = source.meta["val"].dtype
    early = node.target is collectives.all_gather and any(u.op != "output" for u in node.users)
    arguments: tuple[Any, ...] = node.args
    if node.target is collectives.all_reduce:
        _, axes, reduction = arguments
        return None if reduction == "logsumexp" else _Key(node.target, axes, reduction, dtype, None, where, early)
    dim, axes = arguments[1:3]
    if node.target is collectives.reduce_scatter_wide:
        return _Key(node.target, axes, "", dtype, arguments[3], where, early)
    size = arguments[3] if node.target is collectives.all_gather else source.meta["val"].shape[dim]
    if len(axes) > 1 and Segment(size, axes).padded(mesh):
        return None  # padding within stands at the end of every outer chunk, so it goes axis by axis
    return _Key(node.target, axes, "", dtype, None, where, early)


def _buckets(nodes: list[fx.Node], order: dict[fx.Node, int], early: bool, limit: int) -> Iterator[list[fx.Node]]:
    """Cut a list of like collectives into runs that may stand at one place and fit in one message."""
    members: list[fx.Node] = []
    size = 0.0
    for node in nodes:
        bytes_ = _bytes(node)
        if early:
            fits = not members or order[node.all_input_nodes[0]] < order[members[0]]
        else:
            fits = all(order[user] > order[node] for m in members for user in m.users)
        if members and (not fits or size + bytes_ > limit):
            yield members
            members, size = [], 0.0
        members.append(node)
        size += bytes_
    if members:
        yield members


def _bytes(node: fx.Node) -> int:
    """What is sent of the local tensor."""
    value = node.all_input_nodes[0].meta["val"]
    return int(value.numel()) * int(value.dtype.itemsize)


def _join(graph: fx.Graph, key: _Key, members: list[fx.Node], order: dict[fx.Node, int], free: set[fx.Node]) -> None:
    inputs = [m.all_input_nodes[0] for m in members]
    place = members[0] if key.early else members[-1]
    with graph.inserting_before(place):
        if key.target is collectives.all_gather:
            args: tuple[Any, ...] = (inputs, [m.args[1] for m in members], key.axes, [m.args[3] for m in members])
            made = graph.call_function(collectives.all_gather_many, args)
        elif key.target is collectives.reduce_scatter:
            made = graph.call_function(
                collectives.reduce_scatter_many, (inputs, [m.args[1] for m in members], key.axes)
            )
        elif key.target is collectives.reduce_scatter_wide:
            args = (inputs, [m.args[1] for m in members], key.axes, key.rounded)
            made = graph.call_function(collectives.reduce_scatter_wide_many, args)
        else:
            owned = all(i in free for i in inputs) and len(set(inputs)) == len(inputs)
            made = graph.call_function(collectives.all_reduce_many, (inputs, key.axes, key.reduction, owned))
        note = annotation(members[0])
        alike = all(annotation(m).block == note.block for m in members)
        block = note.block if alike else ""
        made.meta = {"meshwright": replace(note, shape=(), sharding=None, block=block)}
        for i, member in enumerate(members):
            item = graph.call_function(operator.getitem, (made, i))
            item.meta = dict(member.meta)
            # later buckets may read these nodes, or be read by them
            order[made] = order[item] = order[place]
            member.replace_all_uses_with(item)
    for member in members:
        graph.erase_node(member)


def collective_calls(nodes: Iterable[fx.Node]) -> int:
    """The number of messages that a graph sends."""
    names = {getattr(collectives, n) for n in dir(collectives) if n.startswith(("all_", "reduce_"))}
    return sum(n.target in names for n in nodes)
