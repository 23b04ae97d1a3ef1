"""What the ranks of a pipeline hold: throughout, of the microbatches that are in flight, and while a pass runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from meshwright.compiler.prediction import Memory, Moment
from meshwright.compiler.schedules.table import Action, Row, Schedule
from meshwright.compiler.summary import KINDS, Pass
from meshwright.compiler.timeline.stage import Passed
from meshwright.compiler.timeline.staged import Staged

Kinds = Mapping[str, int]
State = tuple[tuple[tuple[int, int], ...], int, Pass]
"""By stage of a rank, how many microbatches are between forward and backward, and between the two backward passes; then
what is being computed."""


def _states(row: Row, stages: Sequence[int]) -> Iterator[State]:
    """What a rank goes through."""
    at = {stage: i for i, stage in enumerate(stages)}
    waiting = [[0, 0] for _ in stages]
    for action in actions(row):
        here = waiting[at[action.stage]]
        for kind in ("I", "W") if action.kind == "B" else (action.kind,):
            yield tuple((a, b) for a, b in waiting), action.stage, kind
            here[0] += {"F": 1, "I": -1, "W": 0}[kind]
            here[1] += {"F": 0, "I": 1, "W": -1}[kind]


def peaks(staged: Staged, schedule: Schedule) -> list[int]:
    """By rank, the most bytes that it holds."""
    return [
        RankMemory(staged, stages, row).peak()
        for stages, row in zip(stages_by_rank(schedule), schedule.rows, strict=True)
    ]


def stages_by_rank(schedule: Schedule) -> list[list[int]]:
    """The stages of each rank."""
    return [sorted({stage for _, stage in schedule.stages_of(rank)}) for rank in range(schedule.ranks)]


class RankMemory:
    """What a rank holds while it goes through its passes."""

    def __init__(self, staged: Staged, stages: Sequence[int], row: Row) -> None:
        self._stages, self._uses = stages, staged.uses
        summary = staged.pricers[0].summary
        self._throughout: Counter[str] = Counter()
        for stage in stages:
            self._throughout.update(self._uses[stage].held)
        arriving = [summary.borders[b] for b in dict.fromkeys(staged.firsts) if b in summary.borders]
        self._during = Counter(self._throughout)
        self._during["communication buffers"] += max((b.forward + b.backward for b in arriving), default=0)
        for buffer in summary.prologue.buffers:
            if 0 <= buffer.born < buffer.last == len(summary.prologue.items):
                self._during["batch"] += buffer.bytes
        self._states = dict.fromkeys(_states(row, stages))

    def peak(self) -> int:
        """The most bytes at any moment."""
        base = self._during.total()
        uses = [self._uses[stage] for stage in self._stages]
        sizes = [tuple(sum(kept.values()) for kept in (u.until_input, u.until_weights, u.between)) for u in uses]
        most = max(self._update(stage).total() for stage in self._stages)
        for waiting, stage, kind in self._states:
            live = base + self._uses[stage].passes[kind].memory.peak
            for (first, second), (to_input, to_weights, between) in zip(waiting, sizes, strict=True):
                live += first * to_input + (first + second) * to_weights + second * between
            most = max(most, live)
        return most

    def memory(self) -> Memory:
        """The same with all kinds."""
        moments: list[tuple[Counter[str], Moment]] = []
        for waiting, stage, kind in self._states:
            passed = self._uses[stage].passes[kind]
            at = passed.memory.at
            flying = sum(a + b for a, b in waiting) + (kind == "F")
            name = f"{kind} of stage {stage} with {flying} in flight"
            moments.append((self._live(waiting, passed), Moment(name, at.item, at.phase, at.block)))
        for stage in self._stages:
            at = self._uses[stage].update.memory.at
            moments.append((self._update(stage), Moment("update", at.item, at.phase, at.block)))
        most: Counter[str] = Counter()
        by_graph: dict[str, int] = {}
        for live, moment in moments:
            most |= live
            name = moment.graph.partition(" ")[0]
            by_graph[name] = max(by_graph.get(name, 0), live.total())
        live, moment = max(moments, key=lambda found: found[0].total())
        return Memory(live.total(), moment, _ordered(live), _ordered(most), by_graph)

    def _live(self, waiting: Sequence[tuple[int, int]], passed: Passed) -> Counter[str]:
        live = Counter(self._during)
        for (first, second), other in zip(waiting, self._stages, strict=True):
            use = self._uses[other]
            for kept, times in ((use.until_input, first), (use.until_weights, first + second), (use.between, second)):
                for name, size in kept.items():
                    live[name] += size * times
        live.update(passed.memory.by_kind)
        return live

    def _update(self, stage: int) -> Counter[str]:
        """While a stage updates its weights; the gradients that it reads are counted by its own graph."""
        live = Counter(self._throughout)
        live["gradients"] -= self._uses[stage].held.get("gradients", 0)
        live.update(self._uses[stage].update.memory.by_kind)
        return live


def _ordered(live: Kinds) -> dict[str, int]:
    return {kind: live[kind] for kind in KINDS if live.get(kind)}


def actions(row: Row) -> Iterator[Action]:
    """All actions of a rank, in order."""
    return (action for step in row for action in step)
