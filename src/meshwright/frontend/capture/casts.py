"""The place of nodes that no module made: casts of weights and of gradients, and the optimizer's step of a parameter.

Autograd casts gradients to the weights' dtype last of all, when it has come back to the very beginning; and the casts
of weights are traced before any module. So each is given the block of its parameter here, and a gradient is cast where
it is made: it can then be reduced, and its first form be freed, while backward goes on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from meshwright.compiler.graph.program import Graph, Value, annotation
from meshwright.frontend.capture.origins import Blocks

CAST = torch.ops.aten._to_copy.default


def place_casts(graph: fx.Graph, inputs: Sequence[Value], outputs: Sequence[Value], blocks: Blocks) -> None:
    """Give casts of weights and of gradients the block of their parameter; cast gradients where they are made."""
    for node, value in zip(graph.find_nodes(op="placeholder"), inputs, strict=True):
        if value.kind == "parameter":
            for user in node.users:
                if user.target is CAST:
                    annotation(user).block = annotation(user).block or blocks.around(value.name)
    (output,) = graph.find_nodes(op="output")
    results: Any = output.args[0]
    for node, value in zip(results, outputs, strict=True):
        if value.kind != "gradient" or not isinstance(node, fx.Node):
            continue
        chain: list[fx.Node] = []
        while node.target is CAST and len(node.users) == 1:
            chain.append(node)
            node = node.all_input_nodes[0]
        if len(chain) > 1 and _dtype(node) == _dtype(chain[0]) and all(map(_wide, chain[1:])):
            # to the dtype of the weights and back to that of the sum: nothing has happened
            output.replace_input_with(chain[0], node)
            for cast in chain:
                graph.erase_node(cast)
            continue
        for cast in reversed(chain):
            annotation(cast).block = blocks.around(value.name)
            node.append(cast)
            node = cast


def _wide(node: fx.Node) -> bool:
    return _dtype(node) in (torch.float32, torch.float64)


def _dtype(node: fx.Node) -> torch.dtype | None:
    value = node.meta.get("val")
    return value.dtype if isinstance(value, torch.Tensor) else None


def label_update(graph: Graph, blocks: Blocks) -> None:
    """What is computed from the tensors of one block's parameters alone, besides shared numbers, belongs to it."""
    found: dict[fx.Node, set[str]] = {}
    for value, node in graph.placeholders().items():
        owner = value.name.rpartition("/")[0] if value.kind == "state" else value.name
        found[node] = {blocks.around(owner)} if value.kind in ("parameter", "gradient", "state") else set()
    for node in graph.module.graph.nodes:
        if node.op != "call_function":
            continue
        # what several blocks make together (the gradient norm) is a shared number for whoever reads it
        around = {block for source in node.all_input_nodes for block in found[source]}
        found[node] = around if len(around) == 1 else set()
        annotation(node).block = next(iter(around)) if len(around) == 1 else ""
