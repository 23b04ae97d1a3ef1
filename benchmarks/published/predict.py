"""Predictions of rows from their summaries, on their clusters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from benchmarks.published import plans
from benchmarks.published.programs import Summary
from benchmarks.published.rows import Row, Unreadable
from benchmarks.published.score import Predicted
from meshwright.compiler.cluster.cluster import Cluster
from meshwright.compiler.cluster.device import Efficiency
from meshwright.compiler.mesh import Mesh
from meshwright.compiler.plan import PIPE
from meshwright.compiler.prediction import Execution, Prediction
from meshwright.compiler.summary import RankSummary, StagedSummary
from meshwright.compiler.timeline import simulate
from meshwright.compiler.timeline.planned import Way, pipelined
from meshwright.compiler.timeline.stage import StagePricer


def execution(row: Row) -> Execution:
    """How the source's framework runs ops: written kernels for norms, gates and softmax, or all chains fused."""
    return Execution(row.habits.kernels, row.habits.attention)


def clusters(rows: list[Row]) -> list[Cluster | str]:
    """The cluster of each row, or why there is none."""
    found: list[Cluster | str] = []
    for row in rows:
        try:
            found.append(plans.cluster(row.machine))
        except Unreadable as fault:
            found.append(str(fault))
    return found


def simulated(
    row: Row, summary: Summary, cluster: Cluster, constants: Mapping[str, Efficiency] | None = None
) -> Prediction:
    """What is predicted of a row; ``constants`` by device stand in for those of the catalogue."""
    wanted = (constants or {}).get(cluster.device.name)
    if wanted is not None:
        cluster = replace(cluster, device=replace(cluster.device, efficiency=wanted))
    if isinstance(summary, RankSummary):
        return simulate(summary, cluster, execution(row))
    return _pipeline(row, summary, cluster)


def _pipeline(row: Row, summary: StagedSummary, cluster: Cluster) -> Prediction:
    """Stages of as many layers each, as all frameworks in the rows have them, if that is possible."""
    layout, depth = row.layout, plans.depth(row)
    mesh = Mesh(((PIPE, layout.pipe), *summary.mesh.axes))
    stages = layout.pipe * layout.virtual
    even = tuple(range(0, row.shape.layers, row.shape.layers // stages)) if row.shape.layers % stages == 0 else None
    pricer = StagePricer(summary, cluster, execution(row))
    return pipelined([pricer], depth, Way(mesh, layout.schedule, layout.virtual, even)).prediction


def predicted(found: Prediction) -> Predicted:
    return Predicted(found.seconds, float(found.device_memory), found.fits, float(found.memory.peak))
