"""Nodes in true order, written beside those in sorted order that they stand for."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from meshwright.compiler.graph.program import annotation
from meshwright.frontend.capture.unsorted.states import Build, Numbers

aten = torch.ops.aten


class Writer:
    """Writes into a graph; each new node has the provenance of the one it stands for."""

    def __init__(self, graph: fx.Graph) -> None:
        self._graph = graph
        self._items: dict[fx.Node, fx.Node] = {}
        self._like: fx.Node | None = None

    def build(self, node: fx.Node, build: Build) -> fx.Node:
        """What a node is in true order."""
        self._like = node
        with self._graph.inserting_before(node):
            made = build(self)
        self._items[node] = made
        return made

    def item(self, node: fx.Node) -> fx.Node:
        """A node in true order: itself where it never was in another."""
        return self._items.get(node, node)

    def again(self, node: fx.Node) -> fx.Node:
        """The same call on operands in true order."""
        args, kwargs = fx.map_arg((node.args, node.kwargs), self.item)
        return self.call(node.target, *args, **kwargs)

    def call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """A call, with its fake value."""
        like = self._like
        assert like is not None
        made = self._graph.call_function(target, args, kwargs)
        given, named = fx.map_arg((args, kwargs), lambda n: n.meta["val"])
        with _tensors(like.meta["val"])[0].fake_mode:  # type: ignore[attr-defined]  # a fake tensor's
            made.meta["val"] = target(*given, **named)
        note, source = annotation(made), annotation(like)
        note.origin, note.block, note.phase = source.origin, source.block, source.phase
        return made

    def filled(self, node: fx.Node, number: int | float) -> fx.Node:
        """A tensor like that of a node, of one number."""
        value: Tensor = node.meta["val"]
        return self.call(aten.full.default, list(value.shape), number, dtype=value.dtype, device=value.device)

    def spread(self, x: fx.Node, dim: int, numbers: Numbers, items: int) -> fx.Node:
        """Of each item the row of ``x`` that it names."""
        shape = list(x.meta["val"].shape)
        copies = items // shape[dim]
        if copies == 1:
            return x
        at = dim if numbers.modulus else dim + 1
        wide = [*shape[:at], copies, *shape[at:]]
        each = self.call(aten.expand.default, self.call(aten.unsqueeze.default, x, at), wide)
        return self.call(aten.reshape.default, each, [*shape[:dim], items, *shape[dim + 1 :]])

    def fold(self, x: fx.Node, dim: int, numbers: Numbers, rows: int) -> fx.Node:
        """For each row the sum of the items that name it."""
        shape = list(x.meta["val"].shape)
        copies = shape[dim] // rows
        if copies == 1:
            return x
        split = [copies, rows] if numbers.modulus else [rows, copies]
        each = self.call(aten.reshape.default, x, [*shape[:dim], *split, *shape[dim + 1 :]])
        return self.call(aten.sum.dim_IntList, each, [dim if numbers.modulus else dim + 1])


def _tensors(value: Any) -> list[Tensor]:
    return [v for v in value if isinstance(v, Tensor)] if isinstance(value, (list, tuple)) else [value]
