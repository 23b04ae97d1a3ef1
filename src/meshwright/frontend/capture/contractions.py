"""Turn the matrix products that a trace left behind into ``meshwright.einsum`` and what goes around them."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from meshwright.compiler.graph.program import annotation

aten = torch.ops.aten
EQUATIONS = {
    aten.mm.default: "xz,zy->xy",
    aten.bmm.default: "axz,azy->axy",
    aten.mv.default: "xz,z->x",
    aten.dot.default: "z,z->",
}
WITH_BIAS = {aten.addmm.default: "xz,zy->xy", aten.baddbmm.default: "axz,azy->axy", aten.addmv.default: "xz,z->x"}


def rewrite_contractions(module: fx.GraphModule) -> None:
    """Rewrite in place; every new node has the provenance of the old one."""
    graph = module.graph
    for node in list(graph.nodes):
        if node.target in EQUATIONS:
            with graph.inserting_before(node):
                a, b = node.args
                made = _call(node, torch.ops.meshwright.einsum.default, EQUATIONS[node.target], a, b)
        elif node.target in WITH_BIAS:
            with graph.inserting_before(node):
                bias, a, b = node.args
                made = _call(node, torch.ops.meshwright.einsum.default, WITH_BIAS[node.target], a, b)
                if (alpha := node.kwargs.get("alpha", 1)) != 1:
                    made = _call(node, aten.mul.Tensor, made, alpha)
                if (beta := node.kwargs.get("beta", 1)) != 1:
                    bias = _call(node, aten.mul.Tensor, bias, beta)
                made = _call(node, aten.add.Tensor, made, bias)
        else:
            continue
        node.replace_all_uses_with(made)
        graph.erase_node(node)


def _call(like: fx.Node, target: Any, *args: Any) -> fx.Node:
    made = like.graph.call_function(target, args)
    tensors = fx.map_arg(args, lambda n: n.meta["val"])
    mode = like.meta["val"].fake_mode
    with mode:
        made.meta["val"] = target(*tensors)
    note, source = annotation(made), annotation(like)
    note.origin, note.block, note.phase = source.origin, source.block, source.phase
    return made
