"""A schedule from measured costs and a memory limit: the best of what greedy choices find, and of all named schedules.

Which gaps are worth filling, how many forward passes run ahead, and where stages lie are tried out, and every named
schedule that fits and holds weights once competes: the result is never worse than the best.
"""

from __future__ import annotations

from collections.abc import Iterator

from meshwright.compiler.schedules.lister import NEVER, SAME, Lister, Policy
from meshwright.compiler.schedules.request import Request
from meshwright.compiler.schedules.simulate import Stuck, simulate
from meshwright.compiler.schedules.table import Schedule

NAME = "list"
VIRTUAL = 1
SEARCHED = True
"""Made by comparing others."""


def schedule(request: Request) -> Schedule:
    """The best that is found. Raises :class:`Stuck` if nothing keeps to the memory limit."""
    from meshwright.compiler.schedules.catalogue import named

    best: Schedule | None = None
    seconds, held = NEVER, NEVER

    def compete(candidate: Schedule) -> None:
        nonlocal best, seconds, held
        run = simulate(candidate, request.costs)
        takes, most = (run.seconds if request.together else run.span), max(run.peak)
        fits = request.memory is None or most <= request.memory + SAME
        # of those that are as fast, the one that holds less
        if fits and (takes < seconds * (1 - SAME) or (takes < seconds * (1 + SAME) and most < held)):
            best, seconds, held = candidate, takes, most

    for candidate in named(request):
        # two directions hold all weights twice, which nobody has asked for
        if len(candidate.placement) == 1:
            compete(candidate)
    for placement, policy in _tries(request):
        found = Lister(request, placement, policy, (seconds, held)).schedule()
        if found is not None:
            compete(found)
    if best is None:
        raise Stuck({})
    return best


def _tries(request: Request) -> Iterator[tuple[tuple[int, ...], Policy]]:
    p, m, v = request.ranks, request.microbatches, request.virtual
    limit = float(m * v) if request.memory is None else request.memory
    placements = [tuple(s % p for s in range(v * p))]
    if v > 1:
        # there and back again, so that a rank's neighbours are the same for all its stages
        placements.append(tuple(r for j in range(v) for r in (range(p) if j % 2 == 0 else reversed(range(p)))))
    return ((placement, policy) for placement in placements for policy in _policies(request, limit))


def _policies(request: Request, limit: float) -> Iterator[Policy]:
    p, v = request.ranks, request.virtual
    caps = {
        tuple(NEVER for _ in range(p)),
        *(tuple(float(v * (n * (p - r) - n + 1 + more)) for r in range(p)) for n in (1, 2) for more in (0, 1, 2)),
        *(tuple(float(v * n * p) for _ in range(p)) for n in (1, 2)),
        tuple(float(p * (v - 1) + 2 * (p - r) - 1) for r in range(p)),
    }
    for cap in sorted(caps):
        for patience in (0.0, 0.5, 1.0):
            for deep in (True, False) if v > 1 else (True,):
                for reserve in (True, False) if v > 1 else (False,):
                    yield Policy(cap, limit, patience, deep, reserve)
