"""The stages of a pipeline with what their passes cost, and a schedule of these passes that was simulated."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from meshwright.compiler.cluster.collectives import neighbour_cost
from meshwright.compiler.diagnostics import MeshwrightError, error
from meshwright.compiler.mesh import Mesh
from meshwright.compiler.plan import PIPE
from meshwright.compiler.schedules.request import Costs
from meshwright.compiler.schedules.rounds import expected, in_rounds
from meshwright.compiler.schedules.simulate import Run, Stuck, simulate
from meshwright.compiler.schedules.table import Rounds, Schedule
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
    played: Schedule
    """The same with its rounds, where microbatches meet: what the run has gone through."""


def flowing(
    make: Callable[[int], Schedule], costs: Costs, microbatches: int, ranks: int, rounds: Rounds | None = None
) -> Flowing:
    """Simulate the schedule that ``make`` gives for a number of microbatches; every stage has three actions for each of
    them at most. A schedule that holds more with more microbatches is gone through as a whole."""
    few, more = ((microbatches % ranks) + g * ranks for g in GROUPS)
    if len(costs.stages) * microbatches * 3 > LONG and microbatches > more:
        found, shorter = flow_of(make(more), costs, rounds), flow_of(make(few), costs, rounds)
        if found.run.peak == shorter.run.peak:
            each = (found.seconds - shorter.seconds) / (more - few)
            return replace(found, seconds=found.seconds + each * (microbatches - more))
    return flow_of(make(microbatches), costs, rounds)


def flow_of(schedule: Schedule, costs: Costs, rounds: Rounds | None = None) -> Flowing:
    """Simulate a schedule. Raises MeshwrightError E0766 where microbatches meet and it does not let them."""
    played = schedule
    if rounds is not None and schedule.microbatches > 1:
        if len(schedule.placement) > 1:
            raise _refused(schedule)
        played = in_rounds(schedule, rounds)
    try:
        run = simulate(played, costs)
    except Stuck:
        raise _refused(schedule) from None
    return Flowing(schedule, run, run.seconds, played)


def _refused(schedule: Schedule) -> MeshwrightError:
    message = (
        f"microbatches meet, since couplings of samples are declared global, and {schedule.name} does not let them"
    )
    action = "take schedule=gpipe, or breadth-first with several stages on each rank"
    return error("E0766", message, action=action)


def costs_of(
    uses: Sequence[StageUse], send: float, waits: bool = False, rounds: tuple[tuple[int, int], ...] = ()
) -> Costs:
    """What a schedule's passes cost. ``waits``: a pass is over only when what it sends has left; ``rounds``: in how
    many each stage goes forward and back."""
    if not waits:
        return Costs(send=send, stages=tuple(use.costs for use in uses), rounds=rounds)
    last = len(uses) - 1
    found = []
    for stage, use in enumerate(uses):
        forward, to_input, to_weights = use.costs
        found.append((forward + send * (stage < last), to_input + send * (stage > 0), to_weights))
    return Costs(send=0.0, stages=tuple(found), rounds=rounds)


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
        rounds = tuple(count for count, _ in self._meetings) if self.rounds is not None else ()
        return costs_of(self.uses, send_seconds(self.pricers[0], self.firsts, self.mesh), waits, rounds)

    @cached_property
    def rounds(self) -> Rounds | None:
        """What passes wait for where microbatches meet; None where they do not."""
        return expected(self._meetings)

    @cached_property
    def _meetings(self) -> list[tuple[tuple[int, int], bool]]:
        """By stage, the rounds of its forward and its backward pass, and whether microbatches meet in it."""
        found = []
        for shape, pricer in zip(self.shapes, self.pricers, strict=True):
            known = pricer.summary.meetings
            inside = [(known[block], count) for block, count in shape.blocks if block in known]
            forward = sum(one.forward * count for one, count in inside)
            backward = sum(one.backward * count for one, count in inside)
            found.append(((1 + forward, 1 + backward), any(one.aside for one, _ in inside)))
        return found

    def flow(self, schedule: Schedule) -> Flowing:
        """The stages under a schedule. Raises MeshwrightError E0766 where it does not let microbatches meet."""
        return flow_of(schedule, self.costs, self.rounds)
