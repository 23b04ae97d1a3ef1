"""Values that may be overwritten by the one op that reads them."""

from __future__ import annotations

import torch
from torch import fx

from meshwright.compiler.analysis.kernels import is_view
from meshwright.compiler.graph.rank_program import LocalGraph


def free_values(local: LocalGraph) -> set[fx.Node]:
    """Values that one op alone reads, and whose memory nothing else shares: gradients that come in, results of ops
    that make new tensors, and views of such."""
    nodes = list(local.module.graph.nodes)
    inputs = (n for n in nodes if n.op == "placeholder")
    gradients = [n for value, n in zip(local.signature.inputs, inputs, strict=True) if value.kind == "gradient"]
    free = {n for n in gradients if len(n.users) == 1}
    for node in nodes:
        if not isinstance(node.target, torch._ops.OpOverload):
            continue
        returns = node.target._schema.returns
        # some ops return a view or a copy, as the memory happens to lie
        views = is_view(node) or any(r.alias_info is not None for r in returns)
        if len(node.users) == len(returns) == 1 and (not views or free.issuperset(node.all_input_nodes[:1])):
            free.add(node)
    return free
