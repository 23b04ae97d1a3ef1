"""Large values that depend on no input and are the same for every sample: kept once, and spread where they are used.

A model that writes its attention out adds a mask ``[b 1 t t]`` to the scores. Computed in the step it would take
the memory of the whole global batch, though all samples share it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from meshwright.compiler.graph.fake import fake_tensor
from meshwright.compiler.graph.program import annotation
from meshwright.frontend.capture.constants import TooLarge, constant_nodes, evaluate, once

EXPAND = torch.ops.aten.expand.default
LARGE = 1 << 24
"""Elements from which on it is worth it."""
FEWER = 4
"""How many times smaller the value must become."""


def keep_once(module: fx.GraphModule) -> None:
    """Replace such values by a constant, an attribute of the module, and its expansion."""
    graph = module.graph
    constant = constant_nodes(graph)
    values: dict[fx.Node, Any] = {}
    for node in list(graph.nodes):
        shape = node.meta["val"].shape if node in constant and isinstance(node.meta.get("val"), Tensor) else None
        if shape is None or shape.numel() < LARGE or all(user in constant for user in node.users):
            continue
        if node.target is EXPAND:
            continue  # which takes no memory as it is
        try:
            value = once(evaluate(node, values)).clone(memory_format=torch.contiguous_format)
        except TooLarge:
            continue
        if value.numel() * FEWER > shape.numel():
            continue
        name = f"_spread_{node.name}"
        module.register_buffer(name, value)
        with graph.inserting_before(node):
            kept = graph.get_attr(name)
            spread = graph.call_function(EXPAND, (kept, list(shape)))
        kept.meta["val"] = fake_tensor(value.shape, value.dtype)
        spread.meta["val"] = kept.meta["val"].expand(shape)
        note, like = annotation(spread), annotation(node)
        note.origin, note.block, note.phase = like.origin, like.block, like.phase
        node.replace_all_uses_with(spread)
