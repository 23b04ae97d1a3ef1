"""Which memory the values of a graph live in, how large it is, and until when it is needed."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from meshwright.compiler.analysis.kernels import is_view
from meshwright.compiler.analysis.messages import Sending, sending
from meshwright.compiler.graph import collectives
from meshwright.compiler.graph.functions import COLLECTIVES
from meshwright.compiler.graph.program import annotation
from meshwright.compiler.mesh import Mesh

_FUNCTIONS = set(COLLECTIVES.values()) - {collectives.wait, collectives.offset}
CARRIED = -1
"""The index of the joined tensors that a message holds until it is waited for."""


@dataclass(frozen=True)
class Storage:
    """A piece of memory: the node that makes it, and which of its pieces it is."""

    node: fx.Node
    index: int
    bytes: int


@dataclass
class Storages:
    """The memory that the value of each node keeps alive."""

    owned: dict[fx.Node, tuple[Storage, ...]] = field(default_factory=dict)
    sent: dict[fx.Node, Sending] = field(default_factory=dict)
    """What is done for each collective."""
    _results: dict[fx.Node, list[tuple[Storage, ...]]] = field(default_factory=dict)
    _bytes: dict[fx.Node, int] = field(default_factory=dict)

    def bytes_of(self, node: fx.Node) -> int:
        """What a value holds in bytes, whether it has memory of its own or not."""
        found = self._bytes.get(node)
        if found is None:
            found = self._bytes[node] = sum(tensor_bytes(node))
        return found

    def add(self, node: fx.Node, mesh: Mesh, reused: bool) -> None:
        """Place a node whose operands are placed. It may be ``reused``: its op writes over its first operand."""
        sources = node.all_input_nodes
        if node.target in _FUNCTIONS:
            self._add_collective(node, mesh)
        elif node.target is operator.getitem:
            self.owned[node] = self._item(sources[0], node.args[1])
        elif node.target is collectives.wait:
            self.owned[node] = tuple(s for s in self.owned[sources[0]] if s.index != CARRIED)
            self._results[node] = self._results[sources[0]]
        elif sources and (reused or is_view(node)):
            self.owned[node] = self.owned[sources[0]]
        else:
            made = [Storage(node, i, n) for i, n in enumerate(tensor_bytes(node))]
            self._bytes[node] = sum([s.bytes for s in made])
            self._results[node] = [(s,) for s in made]
            self.owned[node] = tuple(s for s in made if s.bytes)

    def _add_collective(self, node: fx.Node, mesh: Mesh) -> None:
        sent = self.sent[node] = sending(node, mesh)
        pieces = [Storage(node, i, n) for i, n in enumerate(sent.pieces)]
        operands: Any = node.args[0]
        operands = operands if isinstance(operands, (list, tuple)) else [operands]
        results = [(pieces[at],) if at >= 0 else self.owned[operands[-1 - at]] for at in sent.places]
        under_way = sum(size for size, _ in sent.carried) if sent.asynchronous else 0
        carried = [Storage(node, CARRIED, under_way)] if under_way else []
        self._results[node] = results
        self.owned[node] = tuple(dict.fromkeys([*(s for r in results for s in r if s.bytes), *carried]))

    def _item(self, source: fx.Node, index: Any) -> tuple[Storage, ...]:
        results = self._results.get(source)
        return results[index] if results is not None else self.owned[source]


def storages(nodes: Iterable[fx.Node], mesh: Mesh, reused: frozenset[fx.Node] = frozenset()) -> Storages:
    """The memory of all values; a view has that of what it views. The mesh has the axis ``micro``; nodes that are
    ``reused`` write over their first operand."""
    found = Storages()
    for node in nodes:
        if node.op != "output":
            found.add(node, mesh, node in reused)
    return found


def tensor_bytes(node: fx.Node) -> list[int]:
    """The size of every tensor that a node yields, in bytes."""
    value: Any = node.meta.get("val")
    if isinstance(value, torch.Tensor):
        return [int(value.numel()) * value.element_size()]
    values = value if isinstance(value, (tuple, list)) else (value,)
    if any(isinstance(v, torch.Tensor) for v in values):
        return [int(v.numel()) * v.element_size() if isinstance(v, torch.Tensor) else 0 for v in values]
    note = annotation(node)
    return (
        [] if note.dtype is None or value is not None else [int(torch.Size(note.shape).numel()) * note.dtype.itemsize]
    )


def last_reads(order: Sequence[fx.Node], owned: Mapping[fx.Node, tuple[Storage, ...]]) -> dict[Storage, int]:
    """By storage: the last position in ``order`` at which something reads it (its making, if nothing does)."""
    last: dict[Storage, int] = {}
    for position, node in enumerate(order):
        for read in (*node.all_input_nodes, node):
            for storage in owned.get(read, ()):
                last[storage] = position
    return last
