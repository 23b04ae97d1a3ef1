"""A schedule from measured costs and a memory limit: whoever is free takes the most urgent pass that is ready.

Gradients of inputs come first, for others wait for them; then forward passes, as long as memory allows; gradients of
weights fill the gaps. Which gaps are worth filling, how many forward passes run ahead, and where stages lie are tried
out, and every named schedule that fits and holds weights once competes: the result is never worse than the best.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field

from meshwright.compiler.schedules.request import Request
from meshwright.compiler.schedules.simulate import Stuck, simulate
from meshwright.compiler.schedules.table import Action, Schedule, single

NAME = "list"
VIRTUAL = 1
SEARCHED = True
"""Made by comparing others."""


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


def schedule(request: Request) -> Schedule:
    """The best that is found. Raises :class:`Stuck` if nothing keeps to the memory limit."""
    from meshwright.compiler.schedules.catalogue import named

    best: tuple[float, float, Schedule] | None = None
    # two directions hold all weights twice, which nobody has asked for
    one_way = (s for s in named(request) if len(s.placement) == 1)
    for candidate in (*_listed(request), *one_way):
        try:
            run = simulate(candidate, request.costs)
        except Stuck:
            continue
        fits = request.memory is None or max(run.peak) <= request.memory + 1e-9
        seconds = run.seconds if request.together else run.span
        # of those that are as fast, the one that holds less
        rounded, held = float(f"{seconds:.9g}"), max(run.peak)
        if fits and (best is None or (rounded, held) < best[:2]):
            best = rounded, held, candidate
    if best is None:
        raise Stuck({})
    return best[2]


def _listed(request: Request) -> Iterator[Schedule]:
    p, m, v = request.ranks, request.microbatches, request.virtual
    limit = float(m * v) if request.memory is None else request.memory
    placements = [tuple(s % p for s in range(v * p))]
    if v > 1:
        # there and back again, so that a rank's neighbours are the same for all its stages
        placements.append(tuple(r for j in range(v) for r in (range(p) if j % 2 == 0 else reversed(range(p)))))
    for placement in placements:
        for policy in _policies(request, limit):
            try:
                yield Lister(request, placement, policy).schedule()
            except Stuck:
                continue


def _policies(request: Request, limit: float) -> Iterator[Policy]:
    p, v = request.ranks, request.virtual
    every = float("inf")
    caps = {
        tuple(every for _ in range(p)),
        *(tuple(float(v * (n * (p - r) - n + 1 + more)) for r in range(p)) for n in (1, 2) for more in (0, 1, 2)),
        *(tuple(float(v * n * p) for _ in range(p)) for n in (1, 2)),
        tuple(float(p * (v - 1) + 2 * (p - r) - 1) for r in range(p)),
    }
    for cap in sorted(caps):
        for patience in (0.0, 0.5, 1.0):
            for deep in (True, False) if v > 1 else (True,):
                for reserve in (True, False) if v > 1 else (False,):
                    yield Policy(cap, limit, patience, deep, reserve)


@dataclass
class Lister:
    """One run of the list scheduler."""

    request: Request
    placement: tuple[int, ...]
    policy: Policy
    _free: list[float] = field(default_factory=list)
    _held: list[float] = field(default_factory=list)
    _flying: list[int] = field(default_factory=list)
    _ready: list[list[Action]] = field(default_factory=list)
    _rows: list[list[Action]] = field(default_factory=list)
    _coming: list[tuple[float, Action]] = field(default_factory=list)

    def schedule(self) -> Schedule:
        """Raises :class:`Stuck` where the memory limit lets nothing go on."""
        p, m = self.request.ranks, self.request.microbatches
        stages = len(self.placement)
        self._free, self._held, self._flying = [0.0] * p, [0.0] * p, [0] * p
        self._ready, self._rows = [[] for _ in range(p)], [[] for _ in range(p)]
        self._coming = [(0.0, Action("F", 0, i)) for i in range(m)]
        heapq.heapify(self._coming)
        left = 3 * stages * m
        wakes = [(0.0, r) for r in range(p)]
        while left:
            times = [q[0][0] for q in (self._coming, wakes) if q]
            if not times:
                raise Stuck({})
            now = min(times)
            while self._coming and self._coming[0][0] <= now:
                action = heapq.heappop(self._coming)[1]
                self._ready[self.placement[action.stage]].append(action)
            while wakes and wakes[0][0] <= now:
                heapq.heappop(wakes)
            for rank in range(p):
                if self._free[rank] <= now and (chosen := self._choose(rank, now)) is not None:
                    heapq.heappush(wakes, (self._begin(rank, chosen, now), rank))
                    left -= 1
        rows = tuple(single(row) for row in self._rows)
        return Schedule(NAME, (self.placement,), m, rows)

    def _choose(self, rank: int, now: float) -> Action | None:
        ready = self._ready[rank]
        inputs = [a for a in ready if a.kind == "I"]
        if inputs:
            return min(inputs, key=lambda a: (a.microbatch, -a.stage))
        sign = -1 if self.policy.deep else 1
        forwards = [a for a in ready if a.kind == "F" and self._flying[rank] < self.policy.ahead[rank]]
        possible = [a for a in forwards if self._room(rank, a)]
        if possible:
            return min(possible, key=lambda a: (sign * a.stage, a.microbatch))
        weights = [a for a in ready if a.kind == "W"]
        if not weights:
            return None
        chosen = min(weights, key=lambda a: (a.microbatch, -a.stage))
        takes = self.request.costs.of(chosen.stage)[2]
        soon = not forwards and any(
            at < now + self.policy.patience * takes and self.placement[a.stage] == rank and a.kind != "F"
            for at, a in self._coming
        )
        return None if soon else chosen

    def _room(self, rank: int, action: Action) -> bool:
        needed = 1.0
        if self.policy.reserve:
            # microbatches that are on their way through this rank keep the room that they will need
            own = [s for s, r in enumerate(self.placement) if r == rank]
            if action.stage == own[0]:
                needed += len(own) - 1 + self._owed(rank, own)
        return self._held[rank] + needed <= self.policy.limit + 1e-9

    def _owed(self, rank: int, own: list[int]) -> float:
        """Forward passes of later stages of this rank by microbatches that have entered it."""
        count = [0] * len(own)
        for action in self._rows[rank]:
            if action.kind == "F":
                count[own.index(action.stage)] += 1
        return float(sum(count[0] - c for c in count[1:]))

    def _begin(self, rank: int, action: Action, now: float) -> float:
        costs = self.request.costs
        forward, input_, weight = costs.of(action.stage)
        end = now + {"F": forward, "I": input_, "W": weight}[action.kind]
        self._ready[rank].remove(action)
        self._rows[rank].append(action)
        self._free[rank] = end
        self._flying[rank] += {"F": 1, "I": -1, "W": 0}[action.kind]
        self._held[rank] += {"F": 1.0, "I": costs.kept - 1.0, "W": -costs.kept}[action.kind]
        for following in _follow(action, len(self.placement)):
            there = self.placement[following.stage]
            heapq.heappush(self._coming, (end + (costs.send if there != rank else 0.0), following))
        return end


def _follow(action: Action, stages: int) -> Iterator[Action]:
    """What may begin when an action is done."""
    kind, stage, i = action.kind, action.stage, action.microbatch
    if kind == "F":
        yield Action("F", stage + 1, i) if stage + 1 < stages else Action("I", stage, i)
    elif kind == "I":
        yield Action("W", stage, i)
        if stage > 0:
            yield Action("I", stage - 1, i)
