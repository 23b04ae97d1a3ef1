"""Greedy choices with a clock: whoever is free takes the most urgent pass that is ready.

Gradients of inputs come first, for others wait for them; then forward passes, as long as memory allows; gradients of
weights fill the gaps.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush

from meshwright.compiler.schedules.request import Request
from meshwright.compiler.schedules.table import Action, Kind, Schedule, single

NEVER = float("inf")
SAME = 1e-9
"""Times that differ by less than this share are the same."""


@dataclass(frozen=True)
class Policy:
    """How choices are made.

    ``ahead``: by rank, the most forward passes whose gradient of the input has not been computed. ``limit``: the most
    that a rank holds. ``patience``: a weight's gradient is begun only if what is on its way
    comes no sooner than this share of the time that it takes. ``deep``: of forward passes, later stages first.
    ``reserve``: a microbatch enters only with room for all of a rank's stages.
    """

    ahead: tuple[float, ...]
    limit: float
    patience: float = 0.0
    deep: bool = True
    reserve: bool = False


@dataclass
class _Rank:
    """What a rank has done, and what it may do next. Passes that are ready are heaps, the most urgent first."""

    stages: list[int]
    left: float
    """Seconds of work that it has not begun."""
    ahead: float
    began: float | None = None
    free: float = 0.0
    held: float = 0.0
    most: float = 0.0
    flying: int = 0
    """Forward passes whose gradient of the input has not been begun."""
    forwards: dict[int, list[int]] = field(default_factory=dict)
    """By stage, the most urgent stage first: microbatches."""
    inputs: list[tuple[int, int]] = field(default_factory=list)
    """Microbatch, and the stage times -1; so of ``weights``."""
    weights: list[tuple[int, int]] = field(default_factory=list)
    coming: list[float] = field(default_factory=list)
    """When gradients of inputs arrive that are on their way."""
    begun: dict[int, int] = field(default_factory=dict)
    """By stage: how many forward passes."""
    done: list[tuple[Kind, int, int]] = field(default_factory=list)


@dataclass
class Lister:
    """One run of the list scheduler, given up as soon as it cannot be better than ``best``: seconds, what is held."""

    request: Request
    placement: tuple[int, ...]
    policy: Policy
    best: tuple[float, float] = (NEVER, NEVER)
    _ranks: list[_Rank] = field(default_factory=list)
    _events: list[tuple[float, str, int, int]] = field(default_factory=list)
    """When what arrives: kind, stage, microbatch. Without a kind: the rank that gets free."""

    def schedule(self) -> Schedule | None:
        """None if it is given up, or where the memory limit lets nothing go on."""
        m, stages = self.request.microbatches, len(self.placement)
        self._ranks = [self._rank(r) for r in range(self.request.ranks)]
        self._events = [(0.0, "F", 0, i) for i in range(m)]
        heapify(self._events)
        left = 3 * stages * m
        while left:
            if not self._events:
                return None
            now = self._events[0][0]
            touched = set()
            while self._events and self._events[0][0] <= now:
                touched.add(self._arrive(*heappop(self._events)))
            for number in sorted(touched):
                rank = self._ranks[number]
                if rank.free <= now and (chosen := self._choose(rank, now)) is not None:
                    self._begin(number, rank, chosen, now)
                    left -= 1
                    if self._behind(rank):
                        return None
        rows = tuple(single([Action(*one) for one in rank.done]) for rank in self._ranks)
        return Schedule("list", (self.placement,), m, rows)

    def _rank(self, number: int) -> _Rank:
        own = [s for s, r in enumerate(self.placement) if r == number]
        work = self.request.microbatches * sum(sum(self.request.costs.of(s)) for s in own)
        urgent = reversed(own) if self.policy.deep else own
        return _Rank(
            own, work, self.policy.ahead[number], forwards={s: [] for s in urgent}, begun=dict.fromkeys(own, 0)
        )

    def _arrive(self, time: float, kind: str, stage: int, i: int) -> int:
        """The rank that it concerns."""
        if not kind:
            return stage
        number = self.placement[stage]
        rank = self._ranks[number]
        if kind == "F":
            heappush(rank.forwards[stage], i)
        elif kind == "I":
            heappush(rank.inputs, (i, -stage))
            rank.coming.remove(time)
        else:
            heappush(rank.weights, (i, -stage))
        return number

    def _choose(self, rank: _Rank, now: float) -> tuple[Kind, int, int] | None:
        if rank.inputs:
            i, stage = heappop(rank.inputs)
            return "I", -stage, i
        may = rank.flying < rank.ahead and any(rank.forwards.values())
        if may:
            for stage, ready in rank.forwards.items():
                if ready and self._room(rank, stage):
                    return "F", stage, heappop(ready)
        if not rank.weights:
            return None
        takes = self.request.costs.of(-rank.weights[0][1])[2]
        if not may and any(time < now + self.policy.patience * takes for time in rank.coming):
            return None
        i, stage = heappop(rank.weights)
        return "W", -stage, i

    def _room(self, rank: _Rank, stage: int) -> bool:
        needed = 1.0
        if self.policy.reserve and stage == rank.stages[0]:
            # microbatches that are on their way through this rank keep the room that they will need
            entered, *later = (rank.begun[s] for s in rank.stages)
            needed += len(later) + sum(entered - count for count in later)
        return rank.held + needed <= self.policy.limit + SAME

    def _begin(self, number: int, rank: _Rank, chosen: tuple[Kind, int, int], now: float) -> None:
        kind, stage, i = chosen
        costs = self.request.costs
        forward, input_, weight = costs.of(stage)
        takes = forward if kind == "F" else input_ if kind == "I" else weight
        end = now + takes
        rank.done.append(chosen)
        rank.began = now if rank.began is None else rank.began
        rank.free = end
        rank.left -= takes
        heappush(self._events, (end, "", number, 0))
        if kind == "F":
            rank.flying += 1
            rank.begun[stage] += 1
            rank.held += 1.0
            rank.most = max(rank.most, rank.held)
            if stage + 1 < len(self.placement):
                self._send("F", stage + 1, i, number, end)
            else:
                self._send("I", stage, i, number, end)
        elif kind == "I":
            rank.flying -= 1
            rank.held += costs.kept - 1.0
            self._send("W", stage, i, number, end)
            if stage > 0:
                self._send("I", stage - 1, i, number, end)
        else:
            rank.held -= costs.kept

    def _send(self, kind: str, stage: int, i: int, source: int, end: float) -> None:
        """What may begin when a pass has ended."""
        there = self.placement[stage]
        time = end + (self.request.costs.send if there != source else 0.0)
        heappush(self._events, (time, kind, stage, i))
        if kind == "I":
            self._ranks[there].coming.append(time)

    def _behind(self, rank: _Rank) -> bool:
        """Whether what this rank still has to do makes it no better than the best, even without waiting."""
        seconds, held = self.best
        least = rank.free + rank.left - (0.0 if self.request.together or rank.began is None else rank.began)
        return least > seconds * (1 + SAME) or (least > seconds * (1 - SAME) and rank.most >= held)
