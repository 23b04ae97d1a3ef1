"""How long a collective takes on the links that its group crosses."""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.compiler.cluster.cluster import Cluster
from meshwright.compiler.mesh import Mesh
from meshwright.compiler.summary import MessageKind


@dataclass(frozen=True)
class MessageCost:
    seconds: float
    tier: str
    """The slowest tier that it crosses: the link class whose time it takes."""


def message_cost(cluster: Cluster, mesh: Mesh, axes: tuple[str, ...], kind: MessageKind, payload: int) -> MessageCost:
    """The cost of one collective over the group that ``axes`` span, on the mesh as it is laid onto the cluster
    (rank r of the mesh on device r)."""
    raise NotImplementedError
