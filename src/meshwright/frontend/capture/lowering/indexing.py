"""Indexing by every position of a dim is a view.

``transformers`` builds padding masks as ``mask[batch_positions, key_positions]`` with aranges that broadcast
against each other. Read as a lookup it would need the whole batch; it is ``mask[:, None, None, :]``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from meshwright.compiler.graph.adapter import untraced
from meshwright.frontend.capture.constants import constant_nodes, evaluate
from meshwright.frontend.capture.lowering.site import Site, lowers

aten = torch.ops.aten


@lowers(aten.index.Tensor)
def index(site: Site, x: Tensor, indices: list[Tensor | None]) -> Any:
    """A view where each index lists all positions of its dim along a broadcast dim of its own; else as it is."""
    nodes = site.node.args[1]
    assert isinstance(nodes, (list, tuple))
    places = [_place(site, n, x.shape[d]) for d, n in enumerate(nodes) if isinstance(n, fx.Node)]
    taken = [p for p in places if p is not None]
    if len(places) != len(indices) or len(taken) != len(places) or len(set(taken)) != len(taken):
        return aten.index.Tensor(x, indices)
    rank = max(i.dim() for i in indices if i is not None)
    count = len(places)
    order = sorted(range(count), key=lambda d: taken[d])
    shape = [1] * rank
    for d, place in enumerate(taken):
        shape[rank + place] = x.shape[d]
    return x.permute(*order, *range(count, x.dim())).reshape(*shape, *x.shape[count:])


def _place(site: Site, node: fx.Node, length: int) -> int | None:
    """The broadcast dim, counted from the last, along which a constant index runs over all positions."""
    value = node.meta.get("val")
    if not isinstance(value, Tensor) or value.dtype == torch.bool or value.numel() != length:
        return None
    if node not in constant_nodes(site.node.graph):
        return None
    with untraced():
        if evaluate(node).reshape(-1).tolist() != list(range(length)):
            return None
    long = [d for d, n in enumerate(value.shape) if n > 1]
    return long[0] - value.dim() if long else -value.dim()
