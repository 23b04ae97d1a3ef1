"""The memory that the communication library takes of its own while a message is under way, as a part of the summary.

How much is a property of the library, so it stands in the cluster and not in the program: gloo copies what it reduces
and scatters, NCCL copies nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from meshwright.compiler.cluster.cluster import Cluster
from meshwright.compiler.cluster.collectives import message_staging
from meshwright.compiler.mesh import Mesh
from meshwright.compiler.summary import Buffer, GraphSummary, Message, RankSummary, Wait


def with_staging(summary: RankSummary, cluster: Cluster) -> RankSummary:
    """The summary with a buffer for every message that the library makes copies for."""
    if not any(c.staging for tier in cluster.tiers for c in tier.collectives):
        return summary
    return replace(
        summary,
        prologue=_staged(summary.prologue, cluster, summary.mesh),
        micro=_staged(summary.micro, cluster, summary.mesh),
        update=_staged(summary.update, cluster, summary.mesh),
    )


def _staged(graph: GraphSummary, cluster: Cluster, mesh: Mesh) -> GraphSummary:
    return replace(graph, buffers=(*graph.buffers, *_buffers(graph, cluster, mesh)))


def _buffers(graph: GraphSummary, cluster: Cluster, mesh: Mesh) -> Iterator[Buffer]:
    """Taken when the message begins, given back when it has been waited for, or already when its bytes have moved: a
    message that is begun ahead of time has moved long before somebody waits for it."""
    waited = {item.work.message: at for at, item in enumerate(graph.items) if isinstance(item.work, Wait)}
    for at, item in enumerate(graph.items):
        work = item.work
        if isinstance(work, Message):
            held, passing = message_staging(cluster, mesh, work.axes, work.kind, work.payload)
            until = waited.get(at, len(graph.items)) if work.asynchronous else at
            for size, last in ((held, until), (passing, at)):
                if size:
                    yield Buffer(size, "communication buffers", at, last, item.phase, item.block, item.name)
