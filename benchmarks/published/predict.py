"""Predictions of rows from their summaries, on their clusters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from benchmarks.published import frameworks, plans
from benchmarks.published.fitted import RATES
from benchmarks.published.frameworks import Besides, execution
from benchmarks.published.programs import Summary
from benchmarks.published.rows import Row, Unreadable
from benchmarks.published.score import Predicted
from meshwright.compiler.cluster.cluster import Cluster
from meshwright.compiler.cluster.device import Efficiency
from meshwright.compiler.mesh import Mesh
from meshwright.compiler.plan import PIPE
from meshwright.compiler.prediction import Prediction
from meshwright.compiler.summary import RankSummary
from meshwright.compiler.timeline import simulate
from meshwright.compiler.timeline.planned import Way, pipelined
from meshwright.compiler.timeline.stage import StagePricer


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
    row: Row,
    summary: Summary,
    cluster: Cluster,
    constants: Mapping[str, Efficiency] | None = None,
    rates: Mapping[str, float] = RATES,
) -> Prediction:
    """What is predicted of a row; ``constants`` by device stand in for those of the catalogue, ``rates`` of networks
    by framework for those that were fitted."""
    wanted = (constants or {}).get(cluster.device.name)
    if wanted is not None:
        cluster = replace(cluster, device=replace(cluster.device, efficiency=wanted))
    cluster = frameworks.on(row, cluster, rates)
    summary = frameworks.without_wide_tables(summary)
    if isinstance(summary, RankSummary):
        return Besides(row, summary.mesh, cluster)(simulate(summary, cluster, execution(row)))
    layout = row.layout
    mesh = Mesh(((PIPE, layout.pipe), *summary.mesh.axes))
    way = Way(mesh, layout.schedule, layout.virtual, frameworks.starts(row))
    pricer = StagePricer(summary, cluster, execution(row))
    return Besides(row, mesh, cluster)(pipelined([pricer], plans.depth(row), way).prediction)


def predicted(found: Prediction) -> Predicted:
    return Predicted(found.seconds, float(found.device_memory), found.fits, float(found.memory.peak))
