"""Splitting a collective into the op that begins it and the op that waits for it."""

from __future__ import annotations

import operator
from collections.abc import Container, Iterable
from dataclasses import dataclass, replace
from typing import Any

from torch import fx

from meshwright.compiler.diagnostics import InternalError
from meshwright.compiler.graph import collectives
from meshwright.compiler.graph.meeting import meets
from meshwright.compiler.graph.program import annotation
from meshwright.compiler.mesh import Mesh, Segment

GATHERS = (collectives.all_gather, collectives.all_gather_many)
_WIDE = (collectives.reduce_scatter_wide, collectives.reduce_scatter_wide_many)
_SINGLE = (collectives.all_gather, collectives.reduce_scatter, collectives.reduce_scatter_wide, collectives.all_reduce)
_MANY = (
    collectives.all_gather_many,
    collectives.reduce_scatter_many,
    collectives.reduce_scatter_wide_many,
    collectives.all_reduce_many,
)


@dataclass(frozen=True)
class Begun:
    """A collective in two halves; ``wait`` yields the list of its results."""

    begin: fx.Node
    wait: fx.Node

    def gathered(self) -> list[tuple[object, ...]]:
        """What each result is: the tensor that is gathered, along which dim, over which axes, to which size."""
        if self.begin.target is not collectives.all_gather_begin:
            return []
        xs, dims, axes, sizes = (a if isinstance(a, (list, tuple)) else () for a in self.begin.args)
        return [(x, dim, axes, size) for x, dim, size in zip(xs, dims, sizes, strict=True)]

    def result(self, index: int) -> fx.Node:
        """The node that takes one result out of ``wait``."""
        for user in self.wait.users:
            if user.args[1] == index:
                return user
        with self.wait.graph.inserting_after(self.wait):
            made = self.wait.graph.call_function(operator.getitem, (self.wait, index))
        made.meta = {"meshwright": replace(annotation(self.wait))}
        return made


def can_begin(node: fx.Node, mesh: Mesh) -> bool:
    """Whether a node is a collective that may run beside the computation."""
    if node.target in _MANY:
        return True
    if node.target not in _SINGLE or meets(node):
        return False
    if node.target is collectives.all_reduce:
        return len(node.args) < 3 or node.args[2] != "logsumexp"
    if node.target is collectives.reduce_scatter_wide:
        return True
    arguments: tuple[Any, ...] = node.args
    dim, axes = arguments[1:3]
    gathers = node.target is collectives.all_gather
    size = arguments[3] if gathers else node.all_input_nodes[0].meta["val"].shape[dim]
    # padding within stands at the end of every outer chunk, so it goes axis by axis
    return len(axes) == 1 or not Segment(size, axes).padded(mesh)


def split(node: fx.Node, free: Container[fx.Node] = ()) -> Begun:
    """Replace the collective by its two halves, one behind the other. ``free`` values may be overwritten by it."""
    graph, args = node.graph, node.args
    single = node.target in _SINGLE
    if node.target in GATHERS:
        given: tuple[Any, ...] = ([args[0]], [args[1]], args[2], [args[3]]) if single else args
        target: Any = collectives.all_gather_begin
    elif node.target in (collectives.reduce_scatter, collectives.reduce_scatter_many):
        given = ([args[0]], [args[1]], args[2]) if single else args
        target = collectives.reduce_scatter_begin
    elif node.target in _WIDE:
        given = ([args[0]], [args[1]], args[2], args[3]) if single else args
        target = collectives.reduce_scatter_wide_begin
    else:
        given = ([args[0]], args[1], (*args, "sum")[2], args[0] in free) if single else args
        target = collectives.all_reduce_begin
    note = replace(annotation(node), shape=(), dtype=None, sharding=None)
    with graph.inserting_before(node):
        begin = graph.call_function(target, given)
        wait = graph.call_function(collectives.wait, (begin,))
        begin.meta, wait.meta = {"meshwright": replace(note)}, {"meshwright": replace(note)}
        if single:
            result = graph.call_function(operator.getitem, (wait, 0))
            result.meta = dict(node.meta)
            node.replace_all_uses_with(result)
        else:
            node.replace_all_uses_with(wait)
    graph.erase_node(node)
    return Begun(begin, wait)


SMALL = 2**20
"""Bytes below which a message outside of blocks (a norm's weight) belongs to the one beside it."""


def by_block(messages: Iterable[Begun]) -> list[list[Begun]]:
    """Messages that follow each other and are of one block and phase; large ones outside of blocks stand alone."""
    groups: list[list[Begun]] = []
    for message in messages:
        last = groups[-1][-1] if groups else None
        if last is None or _where(last) != _where(message):
            groups.append([message])
        elif annotation(message.begin).block or min(_bytes(last), _bytes(message)) < SMALL:
            groups[-1].append(message)
        else:
            groups.append([message])
    return groups


def _where(message: Begun) -> tuple[str, str]:
    note = annotation(message.begin)
    return note.phase, note.block


def _bytes(message: Begun) -> int:
    values = [n.meta["val"] for n in message.begin.all_input_nodes]
    return sum(v.numel() * v.element_size() for v in values)


def verify_waits(graph: fx.Graph) -> None:
    """Raises InternalError if something that begins is not waited for exactly once, or is read by anything else."""
    for node in graph.nodes:
        if node.target in collectives.BEGINS and [u.target for u in node.users] != [collectives.wait]:
            readers = ", ".join(u.name for u in node.users) or "nothing"
            raise InternalError(f"overlap: {node} must be waited for once, and is read by {readers}")
