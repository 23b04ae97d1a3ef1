"""What a piece of memory is for: parameters, gathered copies of them, activations, and so on."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence

import torch
from torch import fx

import meshwright.compiler.graph.ops  # noqa: F401  (registers the op that is named below)
from meshwright.compiler.analysis.storage import CARRIED, Storage
from meshwright.compiler.graph import collectives
from meshwright.compiler.graph.program import Value, annotation

INPUT_KINDS = {
    "parameter": "parameters",
    "state": "optimizer state",
    "buffer": "buffers",
    "constant": "constants",
    "gradient": "gradients",
}
_TO_DEVICE = torch.ops.meshwright.to_device.default
_GATHERS = (collectives.all_gather, collectives.all_gather_many, collectives.all_gather_begin)


def storage_kinds(
    order: Sequence[fx.Node],
    owned: Mapping[fx.Node, tuple[Storage, ...]],
    inputs: Mapping[fx.Node, Value],
    outputs: Mapping[Value, fx.Node],
) -> dict[Storage, str]:
    """The kind of every storage of a graph."""
    gradients = {s for v, n in outputs.items() if v.kind == "gradient" for s in owned[n]}
    weights: set[fx.Node] = set()  # parameters, and what is nothing but a copy of one
    kinds: dict[Storage, str] = {}
    for node in order:
        if node in inputs:
            own = INPUT_KINDS.get(inputs[node].kind, "batch")
            if inputs[node].kind == "parameter":
                weights.add(node)
        elif node.target in _GATHERS and all(n in weights for n in node.all_input_nodes):
            own = "gathered parameters"
            weights.add(node)
        elif node.target is _TO_DEVICE:
            own = INPUT_KINDS[inputs[node.all_input_nodes[0]].kind]
        else:
            own = "activations" if annotation(node).phase == "forward" else "temporaries"
            if len(node.all_input_nodes) == 1 and node.all_input_nodes[0] in weights and copies(node):
                weights.add(node)
                own = "gathered parameters" if own == "activations" else own
        for storage in owned.get(node, ()):
            if storage.index == CARRIED:
                kinds.setdefault(storage, "communication buffers")
            elif storage.node is node:
                kinds[storage] = "gradients" if storage in gradients and node not in inputs else own
    return kinds


def copies(node: fx.Node) -> bool:
    """Whether a node only views or casts its operand, or takes a part of it."""
    if node.target in (operator.getitem, collectives.wait):
        return True
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    name = node.target._schema.name
    return name in ("aten::_to_copy", "aten::clone", "aten::_unsafe_view") or any(
        r.alias_info is not None for r in node.target._schema.returns
    )
