"""Clean a traced graph without changing what it computes: no copies, no-ops, duplicates or dead code."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor, fx

from meshwright.compiler.graph.adapter import is_mutable, is_random
from meshwright.compiler.graph.program import annotation

aten = torch.ops.aten
COPIES = {
    aten.detach.default,
    aten.alias.default,
    aten.clone.default,
    aten.lift_fresh.default,
    aten.lift_fresh_copy.default,
    aten.contiguous.default,
}
VIEWS = {aten.view.default, aten._unsafe_view.default, aten._reshape_alias.default, aten.reshape.default}
SAME_SHAPE = {
    aten.expand.default,
    aten.slice.Tensor,
    aten.squeeze.dims,
    aten.squeeze.default,
    aten.constant_pad_nd.default,
}


def tidy(module: fx.GraphModule) -> None:
    """All of it, in place."""
    graph = module.graph
    for node in list(graph.nodes):
        if node.op == "call_function":
            _simplify(node)
    _rewrite_cross_entropy(graph)
    _merge_duplicates(graph)
    remove_dead(graph)
    graph.lint()
    module.recompile()


def _simplify(node: fx.Node) -> None:
    if node.target in VIEWS:
        # shards and redistributed tensors have other strides than the traced ones: reshape always works
        shape = list(node.meta["val"].shape)
        viewed: Any = node.args[0]
        while viewed.target is aten.reshape.default:
            viewed = viewed.args[0]
        node.target, node.args, node.kwargs = aten.reshape.default, (viewed, shape), {}
    if node.target is aten.cat.default:
        # models start their caches with empty tensors
        whole: Any = node.args[0]
        node.args = ([n for n in whole if n.meta["val"].numel()] or whole[:1], *node.args[1:])
    if node.target is aten.slice.Tensor:
        given: list[Any] = [*node.args, *(0, None, None)[len(node.args) - 1 :]]
        cut, dim, start, end = given[:4]
        shape = cut.meta["val"].shape
        bounds = slice(start, end).indices(shape[dim])[:2]
        node.args = (cut, dim % len(shape), *bounds, *node.args[4:])
    if _is_identity(node):
        source = _source(node)
        assert source is not None
        node.replace_all_uses_with(source)


def _source(node: fx.Node) -> fx.Node | None:
    """The tensor that the node passes on, if it passes one on."""
    first: Any = node.args[0] if node.args else None
    if node.target is aten.cat.default and len(first) == 1:
        first = first[0]
    return first if isinstance(first, fx.Node) else None


def _is_identity(node: fx.Node) -> bool:
    source = _source(node)
    if source is None:
        return False
    if node.target in COPIES or (node.target is aten.pow.Tensor_Scalar and node.args[1] == 1):
        return True
    before, after = source.meta.get("val"), node.meta.get("val")
    if not (isinstance(before, Tensor) and isinstance(after, Tensor)):
        return False
    same = before.shape == after.shape and before.dtype == after.dtype
    if node.target is aten._to_copy.default:
        return same and before.device == after.device
    if node.target is aten.permute.default:
        return list(node.args[1]) == list(range(before.dim()))  # type: ignore[arg-type]  # dims
    if node.target is aten.constant_pad_nd.default:
        return same and not any(node.args[1])  # type: ignore[arg-type]  # widths
    return same and (node.target in SAME_SHAPE or node.target is aten.reshape.default)


def _rewrite_cross_entropy(graph: fx.Graph) -> None:
    """The loss of each element as logsumexp minus the target's logit: a cut vocabulary then needs no special case."""
    ours = torch.ops.meshwright
    for node in list(graph.nodes):
        if node.target is not ours.cross_entropy.default:
            continue
        logits, target = node.args
        loss, total = node.meta["val"]
        with graph.inserting_before(node):
            whole = _call(graph, node, total, ours.logsumexp.default, logits)
            picked = _call(
                graph, node, total.new_empty(total.shape, dtype=_dtype(logits)), ours.pick.default, logits, target, 0
            )
            losses = _call(graph, node, loss, aten.sub.Tensor, whole, picked)
        for user in list(node.users):
            assert user.target is operator.getitem
            user.replace_all_uses_with(whole if user.args[1] == 1 else losses)


def _dtype(node: Any) -> torch.dtype:
    dtype: torch.dtype = node.meta["val"].dtype
    return dtype


def _call(graph: fx.Graph, like: fx.Node, value: Tensor, target: Any, *args: Any) -> fx.Node:
    """A node with the provenance of ``like``."""
    made = graph.call_function(target, args)
    made.meta["val"] = value
    note, source = annotation(made), annotation(like)
    note.origin, note.block, note.phase = source.origin, source.block, source.phase
    return made


def _merge_duplicates(graph: fx.Graph) -> None:
    """One node for equal calls of a phase. Not across phases: that would keep what backward may compute anew."""
    known: dict[Any, fx.Node] = {}
    for node in list(graph.nodes):
        if node.op != "call_function" or is_mutable(node.target) or is_random(node.target):
            continue
        key = (node.target, _hashable(node.args), _hashable(node.kwargs), annotation(node).phase)
        found = known.setdefault(key, node)
        if found is not node:
            node.replace_all_uses_with(found)


def _hashable(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return (type(value).__name__, *(_hashable(v) for v in value))
    if isinstance(value, dict):
        return tuple(sorted((k, _hashable(v)) for k, v in value.items()))
    if isinstance(value, (bool, int, float)):
        return (type(value).__name__, repr(value))  # 1, 1.0, True, 0.0 and -0.0 are different arguments
    return value


def remove_dead(graph: fx.Graph) -> None:
    """Erase calls that nothing uses; every op left in a captured graph is free of side effects."""
    for node in reversed(list(graph.nodes)):
        if node.op in ("call_function", "get_attr") and not node.users:
            graph.erase_node(node)
