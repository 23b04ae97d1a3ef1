"""Predictions of rows from their summaries, on their clusters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from benchmarks.published import plans
from benchmarks.published.rows import Row, Unreadable
from benchmarks.published.score import Predicted
from meshwright.compiler.cluster.cluster import Cluster
from meshwright.compiler.cluster.device import Efficiency
from meshwright.compiler.prediction import Execution, Prediction
from meshwright.compiler.summary import RankSummary
from meshwright.compiler.timeline import simulate


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
    row: Row, summary: RankSummary, cluster: Cluster, constants: Mapping[str, Efficiency] | None = None
) -> Prediction:
    """What is predicted of a row; ``constants`` by device stand in for those of the catalogue."""
    wanted = (constants or {}).get(cluster.device.name)
    if wanted is not None:
        cluster = replace(cluster, device=replace(cluster.device, efficiency=wanted))
    return simulate(summary, cluster, execution(row))


def predicted(found: Prediction) -> Predicted:
    return Predicted(found.seconds, float(found.device_memory), found.fits, float(found.memory.peak))
