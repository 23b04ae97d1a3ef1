"""What of an update stays in the host's memory, as its graph says: what ``to_device`` reads."""

from __future__ import annotations

import torch
from torch import fx

import meshwright.compiler.graph.ops  # noqa: F401  (registers the ops)
from meshwright.compiler.graph.rank_program import LocalGraph

TO_DEVICE = torch.ops.meshwright.to_device.default
TO_HOST = torch.ops.meshwright.to_host.default


def stores(local: LocalGraph) -> dict[fx.Node, str]:
    """The inputs of an update that lie on the host, with the names of the state tensors that they are."""
    nodes = local.module.graph.find_nodes(op="placeholder")
    roles = zip(local.signature.inputs, nodes, strict=True)
    return {n: v.name for v, n in roles if v.kind == "state" and any(u.target is TO_DEVICE for u in n.users)}


def on_host(local: LocalGraph) -> frozenset[str]:
    """The names of the state tensors that an update takes from the host, ``<parameter>/<entry>``."""
    return frozenset(stores(local).values())
