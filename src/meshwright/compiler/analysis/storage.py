"""Which memory the values of a graph live in, how large it is, and until when it is needed."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from meshwright.compiler.graph import collectives
from meshwright.compiler.graph.program import annotation

_MADE_BY_VIEWING = {"aten::_unsafe_view"}
"""Ops that share memory though their schema does not say so."""


@dataclass(frozen=True)
class Storage:
    """The memory of one tensor: the node that makes it, and which of its results it is."""

    node: fx.Node
    index: int
    bytes: int


def storages(nodes: Iterable[fx.Node]) -> dict[fx.Node, tuple[Storage, ...]]:
    """The memory that each node's value keeps alive; a view has that of what it views."""
    found: dict[fx.Node, tuple[Storage, ...]] = {}
    for node in nodes:
        if node.op == "output":
            continue
        source = _viewed(node)
        if source is None:
            found[node] = tuple(Storage(node, i, n) for i, n in enumerate(tensor_bytes(node)) if n)
        elif node.target is operator.getitem and isinstance(source.meta.get("val"), (tuple, list)):
            found[node] = tuple(s for s in found[source] if s.node is not source or s.index == node.args[1])
        else:
            found[node] = found[source]
    return found


def tensor_bytes(node: fx.Node) -> list[int]:
    """The size of every tensor that a node yields, in bytes."""
    value: Any = node.meta.get("val")
    values = value if isinstance(value, (tuple, list)) else (value,)
    if any(isinstance(v, torch.Tensor) for v in values):
        return [int(v.numel()) * v.element_size() if isinstance(v, torch.Tensor) else 0 for v in values]
    note = annotation(node)
    return [] if note.dtype is None else [int(torch.Size(note.shape).numel()) * note.dtype.itemsize]


def last_reads(order: list[fx.Node], owned: Mapping[fx.Node, tuple[Storage, ...]]) -> dict[Storage, int]:
    """By storage: the last position in ``order`` at which something reads it (its making, if nothing does)."""
    last: dict[Storage, int] = {}
    for position, node in enumerate(order):
        for read in (*node.all_input_nodes, node):
            for storage in owned.get(read, ()):
                last[storage] = position
    return last


def _viewed(node: fx.Node) -> fx.Node | None:
    """The node whose memory this one's value is a view of."""
    sources = node.all_input_nodes
    if node.op != "call_function" or not sources:
        return None
    if node.target is operator.getitem:
        return sources[0]
    if node.target is collectives.shard:
        # a chunk without padding is a part of the whole
        whole, part = tensor_bytes(sources[0]), tensor_bytes(node)
        return sources[0] if part and whole and whole[0] % part[0] == 0 else None
    if isinstance(node.target, torch._ops.OpOverload):
        schema = node.target._schema  # the one place where an op says that it returns a view
        shares = any(r.alias_info is not None for r in schema.returns) or schema.name in _MADE_BY_VIEWING
        return sources[0] if shares else None
    return None
