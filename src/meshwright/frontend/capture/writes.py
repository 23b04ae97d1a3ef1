"""Writes into tensors, as some of autograd's formulas make them, become new tensors.

Everything after capture takes a graph to be functional: copies are dropped, equal ops merged, order changed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from meshwright.compiler.diagnostics import error
from meshwright.compiler.graph.adapter import OpOverload, is_mutable, overload_name
from meshwright.compiler.graph.program import annotation


def without_writes(graph: fx.Graph) -> None:
    """Replace ``x.op_(...)`` by ``op(x, ...)``, which is what later readers of ``x`` then read.

    Raises E0257 where the written memory is also read under another name afterwards.
    """
    position = {n: i for i, n in enumerate(graph.nodes)}
    for node in list(graph.nodes):
        if node.op != "call_function" or not isinstance(node.target, OpOverload) or not is_mutable(node.target):
            continue
        if not _scatter(node, position):
            _replace(node, position)


def _scatter(node: fx.Node, position: dict[fx.Node, int]) -> bool:
    """``whole[a:b].copy_(part)`` is a new ``whole`` with that part."""
    view, part = (*node.args, None, None)[:2]
    if node.target is not torch.ops.aten.copy_.default or not isinstance(view, fx.Node) or node.users:
        return False
    whole = view.args[0] if view.target is torch.ops.aten.slice.Tensor else None
    if not isinstance(whole, fx.Node) or _shares_memory(whole) or len(view.users) > 1:
        return False
    if any(u is not view and position[u] < position[node] and _shares_memory(u) for u in whole.users):
        return False
    later = [u for u in whole.users if position[u] > position[node]]
    node.target = torch.ops.aten.slice_scatter.default
    node.args = (whole, part, *view.args[1:])
    node.meta = {**whole.meta}
    for user in later:
        user.replace_input_with(whole, node)
    return True


def _replace(node: fx.Node, position: dict[fx.Node, int]) -> None:
    written = node.args[0] if node.args else None
    target = _functional(node.target)
    if target is None or not isinstance(written, fx.Node) or _shares_memory(written) or _read_elsewhere(node, position):
        raise error(
            "E0257",
            f"'{node.target}' writes into a tensor that is read under another name afterwards",
            annotation(node).origin,
            "write it out of place",
        )
    node.target = target
    for user in [u for u in written.users if position[u] > position[node]]:
        user.replace_input_with(written, node)


def _functional(target: Any) -> OpOverload | None:
    namespace, name, variant = overload_name(target).split(".", 2)
    found: Any = getattr(getattr(getattr(torch.ops, namespace), name.removesuffix("_"), None), variant, None)
    return found if isinstance(found, OpOverload) and name.endswith("_") else None


def _shares_memory(node: fx.Node) -> bool:
    """Whether the value may lie in the memory of another: an input, or a view."""
    if node.op != "call_function" or not isinstance(node.target, OpOverload):
        return True
    return any(r.alias_info is not None for r in node.target._schema.returns) and not is_mutable(node.target)


def _read_elsewhere(node: fx.Node, position: dict[fx.Node, int]) -> bool:
    """Whether a view of what is written, made before, is read after."""
    written = node.args[0]
    assert isinstance(written, fx.Node)
    views = [u for u in written.users if u is not node and position[u] < position[node] and _shares_memory(u)]
    while views:
        view = views.pop()
        if any(position[u] > position[node] for u in view.users):
            return True
        views.extend(u for u in view.users if position[u] < position[node] and _shares_memory(u))
    return False
