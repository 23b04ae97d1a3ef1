"""From a schedule to the programs of its ranks: who sends what to whom, and when.

All messages have one order, that of the moments at which what they carry is ready in the simulated schedule; on every
rank messages begin in that order. So no rank can wait for a message behind which another waits for it, even if a rank
has no more than one message under way.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from meshwright.compiler.schedules.instructions import Compute, Exchange, Instruction, Program, Transfer, Wait
from meshwright.compiler.schedules.request import Costs
from meshwright.compiler.schedules.simulate import needs, simulate
from meshwright.compiler.schedules.table import Action, Links, Schedule, Step

UPDATE = "update"


@dataclass(frozen=True)
class Edge:
    """A value that goes from one rank to another. Sizes are in bytes, as either side knows them."""

    value: str
    source: int
    target: int
    sent: int = 0
    received: int = 0


Size = Callable[[Action, int], tuple[int, int]]
"""Of what a pass makes for another rank: the bytes that are sent, and those that are expected."""


def unknown(made: Action, target: int) -> tuple[int, int]:
    """Where only the order of messages matters."""
    return 0, 0


def neighbours(stages: int) -> Links:
    """Where a stage reads what its neighbours make, and nothing else."""
    found: dict[tuple[int, str], tuple[tuple[int, str], ...]] = {}
    for s in range(stages):
        found[s, "F"] = ((s - 1, "F"),) if s else ()
        found[s, "I"] = ((s + 1, "I"),) if s + 1 < stages else ()
        found[s, "W"] = ()
    return found


def programs(
    schedule: Schedule, costs: Costs | None = None, size: Size = unknown, links: Links | None = None
) -> tuple[Program, ...]:
    """The program of every rank; ``links``: what passes read of other stages. Raises
    :class:`~meshwright.compiler.schedules.simulate.Stuck` for a schedule that does not come to an end."""
    run = simulate(schedule, costs)
    links = neighbours(schedule.stages) if links is None else links
    ready: dict[Action, float] = {}
    for row, times in zip(schedule.rows, run.times, strict=True):
        for step, (_, end) in zip(row, times, strict=True):
            ready |= {made: end for action in step for made in action.passes}
    moments: defaultdict[tuple[float, int, int], list[Edge]] = defaultdict(list)
    reads: list[list[_Reads]] = []
    for rank, row in enumerate(schedule.rows):
        known: set[Action] = set()
        reads.append([])
        for step in row:
            all_ = _reads(step, links, schedule)
            new = [n for n in all_ if schedule.rank(n) != rank and n not in known]
            known.update(new)
            reads[-1].append(([str(n) for n in new], [str(n) for n in all_ if schedule.rank(n) == rank]))
            for need in new:
                source = schedule.rank(need)
                pair = (min(source, rank), max(source, rank))
                moments[(ready[need], *pair)].append(Edge(str(need), source, rank, *size(need, rank)))
    order = sorted(moments)
    return tuple(
        tuple(_program(schedule, rank, [time[0] for time in run.times[rank]], order, moments, reads[rank]))
        for rank in range(schedule.ranks)
    )


_Reads = tuple[list[str], list[str]]
"""What a step reads of other stages: what comes from other ranks and is not yet waited for; what this one makes."""


def _reads(step: Step, links: Links, schedule: Schedule) -> list[Action]:
    """The results of other stages that a step reads, each once."""
    found: dict[Action, None] = {}
    for kind, stage, i in (one for action in step for one in action.passes):
        of_all = schedule.rounds.meets.get((stage, kind), ()) if schedule.rounds is not None else ()
        for origin in sorted(links[stage, kind]):
            microbatches = range(schedule.microbatches) if origin in of_all else (i,)
            found |= {Action(origin[1], origin[0], j): None for j in microbatches}
    own = {made for action in step for made in action.passes}
    return [action for action in found if action not in own]


def _program(
    schedule: Schedule,
    rank: int,
    begins: list[float],
    order: list[tuple[float, int, int]],
    moments: defaultdict[tuple[float, int, int], list[Edge]],
    reads: list[_Reads],
) -> Iterator[Instruction]:
    mine = iter([moment for moment in order if rank in moment[1:]])
    following = next(mine, None)
    sent: dict[int, list[str]] = {}
    made: list[str] = []
    for step, begin, (waited, here) in zip(schedule.rows[rank], begins, reads, strict=True):
        while following is not None and following[0] <= begin:
            yield from _exchange(rank, moments[following], sent)
            following = next(mine, None)
        yield from map(Wait, waited)
        gives = tuple(dict.fromkeys(str(g) for action in step for g in action.passes))
        made += [value for value in gives if "W" in value]
        inner = {made for action in step for made in action.passes}
        read = (n for action in step for n in needs(action, schedule) if n not in inner)
        local = [str(n) for n in read if schedule.rank(n) == rank]
        yield Compute("+".join(map(str, step)), tuple(dict.fromkeys((*waited, *here, *local))), gives)
    while following is not None:
        yield from _exchange(rank, moments[following], sent)
        following = next(mine, None)
    yield from map(Wait, dict.fromkeys(value for values in sent.values() for value in values))
    yield Compute(UPDATE, tuple(made))


def _exchange(rank: int, edges: list[Edge], sent: dict[int, list[str]]) -> Iterator[Instruction]:
    """What two ranks hand one another at a moment. What was sent to that rank before must have left by then: no more
    than one message to each is kept."""
    transfers = [
        Transfer(True, edge.target, edge.value, edge.sent)
        if edge.source == rank
        else Transfer(False, edge.source, edge.value, edge.received)
        for edge in sorted(edges, key=lambda e: (e.source, e.value))
    ]
    for transfer in transfers:
        if transfer.sends:
            left = sent.pop(transfer.peer, [])
            yield from map(Wait, left)
            for peer, values in sent.items():  # to wait for a value is to wait for all whom it was sent to
                sent[peer] = [value for value in values if value not in left]
    for transfer in transfers:
        if transfer.sends:
            sent.setdefault(transfer.peer, []).append(transfer.value)
    yield Exchange(tuple(transfers))
