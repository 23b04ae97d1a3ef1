"""How long a schedule takes, what waits, and how much is held: every rank does its steps in order."""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.compiler.schedules.request import Costs
from meshwright.compiler.schedules.table import Action, Rounds, Schedule, Step


class Stuck(Exception):
    """No rank can go on. ``waiting``: by rank, its next step and what that waits for, from each rank to the one for
    which it waits, in a circle."""

    def __init__(self, waiting: dict[int, tuple[Step, Action]]) -> None:
        self.waiting = waiting
        lines = (f"rank {r}: {'+'.join(map(str, step))} waits for {action}" for r, (step, action) in waiting.items())
        super().__init__("; ".join(lines))


@dataclass(frozen=True)
class Run:
    """What a simulated schedule did. Times are in the unit of the costs, memory in activations of a stage."""

    times: tuple[tuple[tuple[float, float], ...], ...]
    """By rank and step: when it begins and ends."""
    peak: tuple[float, ...]
    """By rank, the most that is held at once."""

    @property
    def seconds(self) -> float:
        """From the first action of all to the last."""
        return max(ends[-1][1] for ends in self.times if ends)

    @property
    def busy(self) -> tuple[float, ...]:
        """By rank, the time that it computes."""
        return tuple(sum(end - start for start, end in row) for row in self.times)

    @property
    def bubble(self) -> float:
        """The share of the step in which the busiest rank waits, if all ranks begin and end together."""
        return 1 - max(self.busy) / self.seconds

    @property
    def span(self) -> float:
        """The longest that a rank takes from its first action to its last: what a step takes where the update does not
        make ranks wait for one another."""
        return max(row[-1][1] - row[0][0] for row in self.times if row)

    @property
    def waits(self) -> tuple[float, ...]:
        """By rank, the time between its first action and its last in which it does not compute."""
        pairs = zip(self.times, self.busy, strict=True)
        return tuple(row[-1][1] - row[0][0] - busy if row else 0.0 for row, busy in pairs)


def needs(action: Action, schedule: Schedule) -> tuple[Action, ...]:
    """What must be done before an action; a backward pass of the stage above may be whole or split."""
    if schedule.rounds is not None:
        return _needs_of_rounds(action, schedule.rounds, schedule.microbatches)
    kind, stage, i = action
    stages = schedule.stages
    if kind == "F":
        return (Action("F", stage - 1, i),) if stage > 0 else ()
    if kind == "W":
        return (Action("I", stage, i),)
    own = Action("F", stage, i)
    return (own, Action("I", stage + 1, i)) if stage + 1 < stages else (own,)


def _needs_of_rounds(action: Action, rounds: Rounds, microbatches: int) -> tuple[Action, ...]:
    found: dict[Action, None] = {}
    for one in action.passes:
        key = one.stage, one.kind
        for stage, kind in rounds.reads.get(key, ()):
            found[Action(kind, stage, one.microbatch)] = None
        for stage, kind in rounds.meets.get(key, ()):
            found.update(dict.fromkeys(Action(kind, stage, other) for other in range(microbatches)))
    return tuple(need for need in found if need not in action.passes)


def simulate(schedule: Schedule, costs: Costs | None = None) -> Run:
    """Raises :class:`Stuck` for a schedule that does not come to an end."""
    costs = costs or Costs()
    takes = _seconds(costs, schedule)
    done: dict[Action, tuple[float, int]] = {}
    times: list[list[tuple[float, float]]] = [[] for _ in schedule.rows]
    at = [0] * schedule.ranks
    blocked: dict[Action, list[int]] = {}
    ready = list(range(schedule.ranks))
    while ready:
        rank = ready.pop()
        row, own = schedule.rows[rank], times[rank]
        begin = own[-1][1] if own else 0.0
        for position in range(at[rank], len(row)):
            step = row[position]
            missing = None
            for action in step:
                for need in needs(action, schedule):
                    if need in step:
                        continue
                    found = done.get(need)
                    if found is None:
                        missing = need
                        break
                    arrives = found[0] if found[1] == rank else found[0] + costs.send
                    if arrives > begin:
                        begin = arrives
                if missing is not None:
                    break
            if missing is not None:
                blocked.setdefault(missing, []).append(rank)
                break
            if len(step) > 1 and costs.beside is not None:
                end = begin + costs.beside
            else:
                end = begin + sum([takes[action[:2]] for action in step])
            own.append((begin, end))
            begin = end
            for action in step:
                # what others wait for is the gradient of the input, however it is computed
                known = Action("I", action.stage, action.microbatch) if action.kind == "B" else action
                done[known] = (end, rank)
                if known in blocked:
                    ready += blocked.pop(known)
                if action.kind == "B" and schedule.rounds is not None:  # where values decide, it may be the other one
                    weights = action.passes[1]
                    done[weights] = (end, rank)
                    ready += blocked.pop(weights, [])
        at[rank] = len(own)
    waiting = {rank: (schedule.rows[rank][at[rank]], need) for need, ranks in blocked.items() for rank in ranks}
    if waiting:
        raise Stuck(_circle(schedule, waiting))
    return Run(tuple(map(tuple, times)), tuple(_peak(row, costs) for row in schedule.rows))


def _circle(schedule: Schedule, waiting: dict[int, tuple[Step, Action]]) -> dict[int, tuple[Step, Action]]:
    """Those of the ranks that wait, one for the next and the last for the first."""
    rank = min(waiting)
    path: list[int] = []
    while rank in waiting and rank not in path:
        path.append(rank)
        rank = schedule.rank(waiting[rank][1])
    first = path.index(rank) if rank in path else 0
    return {rank: waiting[rank] for rank in path[first:]}


def _seconds(costs: Costs, schedule: Schedule) -> dict[tuple[str, int], float]:
    """What an action takes by itself, by its kind and stage. Rounds of a pass share its time evenly; where two stand
    for more of them, the first has that of all but the last, for which alone other stages wait."""
    found: dict[tuple[str, int], float] = {}
    for stage in range(schedule.stages):
        forward, input_, weight = costs.of(stage)
        for kind, seconds in (("F", forward), ("I", input_), ("W", weight), ("B", input_ + weight)):
            found[kind, stage] = seconds
    if schedule.rounds is not None:
        most: dict[tuple[str, int], int] = {}
        for stage, kind in schedule.rounds.reads:
            most[kind[0], stage] = max(most.get((kind[0], stage), 0), int(kind[1:] or 0))
        for (family, stage), last in most.items():
            if last:
                whole, few = found[family, stage], bool(costs.rounds) and last == 1 and family in "FI"
                count = costs.rounds[stage]["FI".index(family)] if few else last + 1
                found |= {(f"{family}{number or ''}", stage): whole / count for number in range(last + 1)}
                found[family, stage] = whole * (count - last) / count
    return found


def _peak(row: tuple[Step, ...], costs: Costs) -> float:
    held = most = 0.0
    freed = {"F": 0.0, "B": 1.0, "I": 1.0 - costs.kept, "W": costs.kept}
    for step in row:
        held += sum([action.kind == "F" for action in step])
        most = max(most, held)
        for action in step:
            held -= freed.get(action.kind, 0.0)
    return most
