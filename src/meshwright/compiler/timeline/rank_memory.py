"""What the ranks of a pipeline hold: throughout, of the microbatches that are in flight, and while a pass runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property

from meshwright.compiler.cluster.device import Efficiency
from meshwright.compiler.prediction import Memory, Moment
from meshwright.compiler.schedules.table import Action, Row, Schedule
from meshwright.compiler.summary import KINDS, Pass
from meshwright.compiler.timeline.staged import Staged

Kinds = Mapping[str, int]
State = tuple[tuple[tuple[int, int], ...], tuple[bool, ...], int, Pass]
"""By stage of a rank, how many microbatches are between forward and backward, and between the two backward passes, and
whether its gradients have begun to be added up; then what is being computed."""


_CHANGE: Mapping[Pass, tuple[int, int]] = {"F": (1, 0), "I": (-1, 1), "W": (0, -1)}
"""What a pass changes in the numbers of microbatches before, and between, the backward passes."""


def _states(row: Row, stages: Sequence[int], giving: Mapping[int, Pass]) -> Iterator[State]:
    """What a rank goes through. ``giving`` has by stage the pass that gives the gradients of its weights."""
    at = {stage: i for i, stage in enumerate(stages)}
    waiting = [(0, 0) for _ in stages]
    begun = [False for _ in stages]
    for action in actions(row):
        own = at[action.stage]
        for kind in ("I", "W") if action.kind == "B" else (action.kind,):
            yield tuple(waiting), tuple(begun), action.stage, kind
            first, second = waiting[own]
            more, then = _CHANGE[kind]
            waiting[own] = first + more, second + then
            begun[own] |= kind == giving[action.stage]


def needed(staged: Staged, schedule: Schedule) -> list[int]:
    """By rank, the bytes of the device that it needs."""
    efficiency = staged.pricers[0].cluster.device.efficiency
    return [RankMemory(staged, schedule, rank).needed(efficiency) for rank in range(schedule.ranks)]


def stages_by_rank(schedule: Schedule) -> list[list[int]]:
    """The stages of each rank."""
    return [sorted({stage for _, stage in schedule.stages_of(rank)}) for rank in range(schedule.ranks)]


class RankMemory:
    """What a rank holds while it goes through its passes."""

    def __init__(self, staged: Staged, schedule: Schedule, rank: int) -> None:
        stages = stages_by_rank(schedule)[rank]
        self._stages, self._uses = stages, staged.uses
        summary = staged.pricers[0].summary
        self._throughout: Counter[str] = Counter()
        for stage in stages:
            self._throughout.update({k: n for k, n in self._uses[stage].held.items() if k != "gradients"})
        self._gradients = {stage: self._uses[stage].held.get("gradients", 0) for stage in stages}
        self._during = Counter(self._throughout)
        self._during["communication buffers"] += _in_messages(staged, schedule, rank)
        for buffer in summary.prologue.buffers:
            if 0 <= buffer.born < buffer.last == len(summary.prologue.items):
                self._during["batch"] += buffer.bytes
        giving = {stage: self._uses[stage].giving for stage in stages}
        self._states = dict.fromkeys(_states(schedule.rows[rank], stages, giving))

    def peak(self) -> int:
        """The most bytes at any moment."""
        return max(live for live, _ in self._moments)

    def needed(self, efficiency: Efficiency) -> int:
        """Bytes of the device: the most, with what the allocator wastes and what libraries take."""
        wasted, flying = 1 + efficiency.fragmentation, efficiency.in_flight
        return int(max(live * wasted + kept * flying for live, kept in self._moments)) + efficiency.reserve

    @cached_property
    def _moments(self) -> list[tuple[int, int]]:
        """The bytes at each moment, and those of them that microbatches in flight keep."""
        moments = [(self._update(stage).total(), 0) for stage in self._stages]
        base = self._during.total()
        uses = [self._uses[stage] for stage in self._stages]
        sizes = [tuple(sum(kept.values()) for kept in (u.until_input, u.until_weights, u.between)) for u in uses]
        for waiting, begun, stage, kind in self._states:
            kept = 0
            for (first, second), (to_input, to_weights, between) in zip(waiting, sizes, strict=True):
                kept += first * to_input + (first + second) * to_weights + second * between
            live = base + self._made(begun, stage, kind).peak + self._accumulated(begun) + kept
            moments.append((live, kept))
        return moments

    def memory(self) -> Memory:
        """The same with all kinds."""
        moments: list[tuple[Counter[str], Moment]] = []
        for waiting, begun, stage, kind in self._states:
            made = self._made(begun, stage, kind)
            flying = sum(a + b for a, b in waiting) + (kind == "F")
            name = f"{kind} of stage {stage} with {flying} in flight"
            live = self._live(waiting, made)
            live["gradients"] += self._accumulated(begun)
            moments.append((live, Moment(name, made.at.item, made.at.phase, made.at.block)))
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

    def _made(self, begun: Sequence[bool], stage: int, kind: Pass) -> Memory:
        """What a pass makes itself; the first that gives gradients leaves them as accumulators."""
        use = self._uses[stage]
        if kind == use.giving and not begun[self._stages.index(stage)]:
            return use.first.memory
        return use.passes[kind].memory

    def _accumulated(self, begun: Sequence[bool]) -> int:
        return sum(self._gradients[stage] for stage, there in zip(self._stages, begun, strict=True) if there)

    def _live(self, waiting: Sequence[tuple[int, int]], made: Memory) -> Counter[str]:
        live = Counter(self._during)
        for (first, second), other in zip(waiting, self._stages, strict=True):
            use = self._uses[other]
            for kept, times in ((use.until_input, first), (use.until_weights, first + second), (use.between, second)):
                for name, size in kept.items():
                    live[name] += size * times
        live.update(made.by_kind)
        return live

    def _update(self, stage: int) -> Counter[str]:
        """While a stage updates its weights; the gradients that it reads are counted by its own graph."""
        live = Counter(self._throughout)
        live["gradients"] += sum(self._gradients.values()) - self._gradients[stage]
        live.update(self._uses[stage].update.memory.by_kind)
        return live


def _in_messages(staged: Staged, schedule: Schedule, rank: int) -> int:
    """The bytes of buffers for messages to and from other stages' ranks: one to receive each value in, beside those
    that are kept for microbatches in flight, and to every other rank one message that has not left yet."""
    borders = staged.pricers[0].summary.borders
    received: dict[tuple[int, str], int] = {}
    sent: dict[int, int] = {}
    for place in schedule.placement:
        for stage, first in enumerate(staged.firsts, 1):
            before, after = place[stage - 1], place[stage]
            border = borders.get(first)
            if border is None or before == after or rank not in (before, after):
                continue
            comes, goes = (border.forward, border.backward) if rank == after else (border.backward, border.forward)
            other = before if rank == after else after
            received[stage, "F" if rank == after else "I"] = comes
            sent[other] = max(sent.get(other, 0), goes)
    return sum(received.values()) + sum(sent.values())


def _ordered(live: Kinds) -> dict[str, int]:
    return {kind: live[kind] for kind in KINDS if live.get(kind)}


def actions(row: Row) -> Iterator[Action]:
    """All actions of a rank, in order."""
    return (action for step in row for action in step)
