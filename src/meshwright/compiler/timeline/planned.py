"""From a way to pipeline a step to its prediction, and to what a plan says of it.

Stages may recompute differently: those that hold many microbatches at once as much as they must, the others nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from meshwright.compiler.diagnostics import error
from meshwright.compiler.mesh import Mesh
from meshwright.compiler.plan import PIPE, Pipeline
from meshwright.compiler.prediction import Prediction
from meshwright.compiler.schedules import catalogue
from meshwright.compiler.schedules.of_plan import from_table
from meshwright.compiler.schedules.request import Request
from meshwright.compiler.schedules.table import Schedule
from meshwright.compiler.timeline.cuts import Depth, balanced, block_seconds, partition_each
from meshwright.compiler.timeline.pipeline import predict
from meshwright.compiler.timeline.rank_memory import needed
from meshwright.compiler.timeline.stage import StagePricer, StageUse
from meshwright.compiler.timeline.staged import Flowing, Staged, flow_of, flowing

SEARCHED = "list"
"""The schedule that follows from the costs, so that a plan must hold its table."""
TRIES = 4
"""So often the searched schedule is given less memory, if it turns out to need more than there is."""


@dataclass(frozen=True)
class Pipelined:
    """A pipeline, and what is predicted of it."""

    pipeline: Pipeline
    prediction: Prediction
    levels: tuple[int, ...]
    """By stage, the number of the pricer that it was priced by."""


@dataclass(frozen=True)
class Way:
    """How a step is cut by depth and in which order its passes run."""

    mesh: Mesh
    """With the axis ``pipe``."""
    schedule: str
    virtual: int = 1
    starts: tuple[int, ...] | None = None
    """Where stages begin; default: where they are balanced."""
    room: float = float("inf")
    """Bytes of a device that a rank may need; for the searched schedule, and for what stages recompute."""

    @property
    def ranks(self) -> int:
        return self.mesh.size(PIPE)

    def placement(self) -> tuple[int, ...]:
        """The rank of each stage; of the searched schedule, as those have it that it competes with."""
        name = self.schedule
        if name == SEARCHED:
            name = "1f1b" if self.virtual == 1 else "interleaved"
        return catalogue.make(name, Request(self.ranks, self.ranks, self.virtual)).placement[0]


def pipelined(pricers: Sequence[StagePricer], depth: Depth, way: Way) -> Pipelined:
    """Cut the model into stages and predict a step.

    Of several ``pricers``, of which each recomputes more than the one before, every stage takes the first with which
    its rank has enough room. Raises MeshwrightError E0501, E0502 and E0504 for a schedule that cannot be.
    """
    stages = way.ranks * way.virtual
    if stages > len(depth.names):
        message = f"{stages} stages cannot be made of {len(depth.names)} repeated blocks"
        raise error("E0502", message, action=f"use at most pp={len(depth.names) // way.virtual}")
    starts = way.starts or balanced(depth, pricers[0], way.placement())
    found = _fitted(pricers, depth, way, starts)
    if any(found.levels) and way.starts is None and way.virtual == 1:
        # what recomputes takes longer, so that other cuts are even
        each = [block_seconds(depth, pricers[level]) for level in found.levels]
        other = _fitted(pricers, depth, way, partition_each(each), found.levels)
        if other.levels == found.levels and other.prediction.seconds < found.prediction.seconds:
            return other
    return found


def repriced(pricers: Sequence[StagePricer], depth: Depth, way: Way, found: Pipelined) -> Pipelined:
    """The same stages under the same table, as other pricers have them."""
    starts = depth.starts(found.pipeline.first_blocks)
    staged = staged_at([pricers[level] for level in found.levels], depth, way.mesh, starts)
    count = staged.pricers[0].summary.microbatches
    schedule = from_table(found.pipeline.schedule, found.pipeline.table, way.ranks, len(starts), count)
    return replace(found, prediction=predict(staged, staged.flow(schedule)))


def _fitted(
    pricers: Sequence[StagePricer],
    depth: Depth,
    way: Way,
    starts: Sequence[int],
    levels: Sequence[int] | None = None,
) -> Pipelined:
    """Begin with those levels (the first of all), and let stages recompute more until every rank has room."""
    own = list(levels or [0] * len(starts))
    while True:
        staged = staged_at([pricers[level] for level in own], depth, way.mesh, starts)
        flow, table = _flow(staged, way)
        if len(pricers) == 1:
            break
        raised = _raise(staged, own, needed(staged, flow.schedule), flow.schedule, way.room, len(pricers))
        if not raised:
            break
        for stage in raised:
            own[stage] += 1
    pipeline = Pipeline(tuple(depth.names[start] for start in starts[1:]), way.schedule, table)
    return Pipelined(pipeline, predict(staged, flow), tuple(own))


def _raise(
    staged: Staged, levels: Sequence[int], needs: Sequence[int], schedule: Schedule, room: float, count: int
) -> list[int]:
    """Of every rank that has too little room, the stage that keeps most and can recompute more."""
    found = []
    for rank, need in enumerate(needs):
        own = [s for _, s in schedule.stages_of(rank) if levels[s] + 1 < count]
        if need > room and own:
            found.append(max(own, key=lambda s: (-levels[s], _kept(staged.uses[s]))))
    return list(dict.fromkeys(found))


def _kept(use: StageUse) -> int:
    return sum(use.until_input.values()) + sum(use.until_weights.values())


def _flow(staged: Staged, way: Way) -> tuple[Flowing, str]:
    """The schedule as it runs; its table if it follows from the costs."""
    count = staged.pricers[0].summary.microbatches
    costs = staged.costs
    if way.schedule != SEARCHED:

        def make(microbatches: int) -> Schedule:
            return catalogue.make(way.schedule, Request(way.ranks, microbatches, way.virtual, costs))

        return flowing(make, costs, count, way.ranks, staged.rounds), ""
    first = max(_kept(use) for use in staged.uses)
    late = max(sum(use.until_weights.values()) + sum(use.between.values()) for use in staged.uses)
    costs = replace(costs, kept=late / first if first else 1.0)
    limit = _limit(staged, way.room, first)
    for _ in range(TRIES):
        found = catalogue.make(SEARCHED, Request(way.ranks, count, way.virtual, costs, limit))
        if limit is None or max(needed(staged, found)) <= way.room or limit <= way.ranks * way.virtual:
            break
        limit = max(limit - max(1.0, limit / 10), float(way.ranks * way.virtual))
    return flow_of(found, costs, staged.rounds), str(found)


def _limit(staged: Staged, room: float, each: int) -> float | None:
    """How many activations of a stage a rank has room for."""
    if room == float("inf") or not each:
        return None
    ranks = staged.mesh.size(PIPE)
    efficiency = staged.pricers[0].cluster.device.efficiency
    room = (room - efficiency.reserve) / (1 + efficiency.fragmentation)
    waste = efficiency.in_flight / (1 + efficiency.fragmentation)
    held = max(sum(use.held.values()) for use in staged.uses) * (len(staged.uses) // ranks)
    passing = max(p.memory.peak for use in staged.uses for p in use.passes.values())
    return max((room - held - passing) / (each * (1 + waste)), float(len(staged.uses)))


def staged_at(pricers: Sequence[StagePricer], depth: Depth, mesh: Mesh, starts: Sequence[int]) -> Staged:
    """The stages that begin at those places, each by its pricer."""
    return Staged(mesh, depth.shapes(starts), pricers, [depth.like[start] for start in starts[1:]])


def scheduled(
    pricer: StagePricer, depth: Depth, mesh: Mesh, pipeline: Pipeline, schedule: Schedule, *, spans: bool = False
) -> Prediction:
    """Predict a step of a pipeline that is given, under its schedule."""
    starts = depth.starts(pipeline.first_blocks)
    staged = staged_at([pricer] * len(starts), depth, mesh, starts)
    return predict(staged, staged.flow(schedule), spans=spans)
