"""From a schedule to the programs of its ranks: who sends what to whom, and when.

All messages have one order, that of the moments at which what they carry is ready in the simulated schedule; on every
rank messages begin in that order. So no rank can wait for a message behind which another waits for it, even if a rank
has no more than one message under way.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from meshwright.compiler.schedules.instructions import Compute, Exchange, Instruction, Program, Transfer, Wait
from meshwright.compiler.schedules.request import Costs
from meshwright.compiler.schedules.simulate import needs, simulate
from meshwright.compiler.schedules.table import Action, Schedule, Step

UPDATE = "update"


@dataclass(frozen=True)
class Edge:
    """A value that goes from one rank to another."""

    value: str
    source: int
    target: int


def programs(schedule: Schedule, costs: Costs | None = None, size: int = 0) -> tuple[Program, ...]:
    """The program of every rank; ``size`` is that of a message in bytes, if it is known. Raises
    :class:`~meshwright.compiler.schedules.simulate.Stuck` for a schedule that does not come to an end."""
    run = simulate(schedule, costs)
    ready: dict[Action, float] = {}
    for row, times in zip(schedule.rows, run.times, strict=True):
        for step, (_, end) in zip(row, times, strict=True):
            ready |= {done(action): end for action in step}
    moments: defaultdict[tuple[float, int, int], list[Edge]] = defaultdict(list)
    for rank, row in enumerate(schedule.rows):
        for step in row:
            for need in _needs(step, schedule.stages):
                source = schedule.rank(need)
                if source != rank:
                    pair = (min(source, rank), max(source, rank))
                    moments[(ready[need], *pair)].append(Edge(str(need), source, rank))
    order = sorted(moments)
    return tuple(
        tuple(_program(schedule, rank, [time[0] for time in run.times[rank]], order, moments, size))
        for rank in range(schedule.ranks)
    )


def done(action: Action) -> Action:
    """What others wait for when an action is over: of a whole backward pass, the gradient of the input."""
    return Action("I", action.stage, action.microbatch) if action.kind == "B" else action


def _needs(step: Step, stages: int) -> Iterator[Action]:
    """The results that a step reads and does not make itself."""
    own = {done(action) for action in step}
    return (need for action in step for need in needs(action, stages) if need not in own)


def _program(
    schedule: Schedule,
    rank: int,
    begins: list[float],
    order: list[tuple[float, int, int]],
    moments: defaultdict[tuple[float, int, int], list[Edge]],
    size: int,
) -> Iterator[Instruction]:
    mine = iter([moment for moment in order if rank in moment[1:]])
    following = next(mine, None)
    sent: dict[int, list[str]] = {}
    made: list[str] = []
    for step, begin in zip(schedule.rows[rank], begins, strict=True):
        while following is not None and following[0] <= begin:
            yield from _exchange(rank, moments[following], sent, size)
            following = next(mine, None)
        incoming = [str(n) for n in _needs(step, schedule.stages) if schedule.rank(n) != rank]
        yield from map(Wait, incoming)
        gives = tuple(dict.fromkeys(str(g) for action in step for g in _gives(action)))
        made += [value for value in gives if "W" in value]
        read = tuple(str(n) for n in _needs(step, schedule.stages))
        yield Compute("+".join(map(str, step)), read, gives)
    while following is not None:
        yield from _exchange(rank, moments[following], sent, size)
        following = next(mine, None)
    yield from (Wait(value) for values in sent.values() for value in values)
    yield Compute(UPDATE, tuple(made))


def _gives(action: Action) -> Iterator[Action]:
    yield done(action)
    if action.kind == "B":
        yield Action("W", action.stage, action.microbatch)


def _exchange(rank: int, edges: list[Edge], sent: dict[int, list[str]], size: int) -> Iterator[Instruction]:
    """What two ranks hand one another at a moment. What was sent to that rank before must have left by then: no more
    than one message to each is kept."""
    transfers = [
        Transfer(edge.source == rank, edge.target if edge.source == rank else edge.source, edge.value, size)
        for edge in sorted(edges, key=lambda e: (e.source, e.value))
    ]
    for transfer in transfers:
        if transfer.sends:
            yield from map(Wait, sent.pop(transfer.peer, []))
    for transfer in transfers:
        if transfer.sends:
            sent.setdefault(transfer.peer, []).append(transfer.value)
    yield Exchange(tuple(transfers))
