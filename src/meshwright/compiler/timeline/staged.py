"""The stages of a pipeline with what their passes cost, and a schedule of these passes that was simulated."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

from meshwright.compiler.cluster.collectives import neighbour_cost
from meshwright.compiler.mesh import Mesh
from meshwright.compiler.plan import PIPE
from meshwright.compiler.schedules.request import Costs
from meshwright.compiler.schedules.simulate import Run, simulate
from meshwright.compiler.schedules.table import Schedule
from meshwright.compiler.timeline.stage import Shape, StagePricer, StageUse

LONG = 4_000
"""Actions of a schedule above which its beginning and end stand for it: in between, every group of as many microbatches
as ranks takes as long."""
GROUPS = 8, 12
"""So many groups are gone through then, to see what a further one takes: within 0.7 % of the whole, for every named
schedule of stages whose costs differ by up to a factor of two."""


@dataclass(frozen=True)
class Flowing:
    """A schedule that was simulated, as if of all microbatches."""

    schedule: Schedule
    """With fewer microbatches, where there are very many."""
    run: Run
    seconds: float


def flowing(make: Callable[[int], Schedule], costs: Costs, microbatches: int, ranks: int) -> Flowing:
    """Simulate the schedule that ``make`` gives for a number of microbatches; every stage has three actions for each of
    them at most. A schedule that holds more with more microbatches is gone through as a whole."""
    few, more = ((microbatches % ranks) + g * ranks for g in GROUPS)
    if len(costs.stages) * microbatches * 3 > LONG and microbatches > more:
        schedule = make(more)
        run, shorter = simulate(schedule, costs), simulate(make(few), costs)
        if run.peak == shorter.peak:
            each = (run.seconds - shorter.seconds) / (more - few)
            return Flowing(schedule, run, run.seconds + each * (microbatches - more))
    schedule = make(microbatches)
    run = simulate(schedule, costs)
    return Flowing(schedule, run, run.seconds)


def costs_of(uses: Sequence[StageUse], send: float, waits: bool = False) -> Costs:
    """What a schedule's passes cost. ``waits``: a pass is over only when what it sends has left."""
    if not waits:
        return Costs(send=send, stages=tuple(use.costs for use in uses))
    last = len(uses) - 1
    found = []
    for stage, use in enumerate(uses):
        forward, to_input, to_weights = use.costs
        found.append((forward + send * (stage < last), to_input + send * (stage > 0), to_weights))
    return Costs(send=0.0, stages=tuple(found))


def send_seconds(pricer: StagePricer, firsts: Sequence[str], mesh: Mesh) -> float:
    """To hand on what crosses the widest border; ``firsts`` are the summary's blocks that stages begin with."""
    borders = [pricer.summary.borders[block] for block in dict.fromkeys(firsts) if block in pricer.summary.borders]
    payload = max((max(b.forward, b.backward) for b in borders), default=0)
    return neighbour_cost(pricer.cluster, mesh, PIPE, payload).seconds if payload else 0.0


@dataclass(frozen=True)
class Staged:
    """A pipeline to be predicted: the shapes of its stages, each with the pricer whose summary it is cut from."""

    mesh: Mesh
    """With ``pipe``."""
    shapes: Sequence[Shape]
    pricers: Sequence[StagePricer]
    firsts: Sequence[str]

    @cached_property
    def uses(self) -> list[StageUse]:
        """What each stage takes."""
        return [pricer(shape) for pricer, shape in zip(self.pricers, self.shapes, strict=True)]

    @cached_property
    def costs(self) -> Costs:
        waits = self.pricers[0].execution.waits_for_sends
        return costs_of(self.uses, send_seconds(self.pricers[0], self.firsts, self.mesh), waits)
