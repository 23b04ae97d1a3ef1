"""Interleaved 1F1B (Narayanan et al. 2021): several stages on each rank, through which microbatches go in groups."""

from __future__ import annotations

from meshwright.compiler.schedules.request import Request
from meshwright.compiler.schedules.table import Action, Schedule, alternate, only, single

NAME = "interleaved"
VIRTUAL = 2


def schedule(request: Request) -> Schedule:
    """Bubble: that of 1F1B divided by ``v``, where the microbatches fill groups. In flight on rank ``r``:
    ``min(v m, p (v-1) + 2 (p-r) - 1)``."""
    p, m, v = request.ranks, request.microbatches, request.virtual
    rows = []
    for r in range(p):
        forward, backward = passes(request, r)
        rows.append(single(alternate(forward, backward, ahead(request, r))))
    return Schedule(NAME, (tuple(s % p for s in range(v * p)),), m, only(rows, m))


def passes(request: Request, rank: int) -> tuple[list[Action], list[Action]]:
    """The forward and the backward passes of a rank, each in order: a group of microbatches, of which there are as many
    as ranks, goes through all its stages before the next group. The last group is filled up."""
    p, v = request.ranks, request.virtual
    stages = [rank + p * j for j in range(v)]
    groups = [range(start, start + p) for start in range(0, request.microbatches, p)]
    forward = [Action("F", s, i) for group in groups for s in stages for i in group]
    return forward, [Action("B", s, i) for group in groups for s in reversed(stages) for i in group]


def ahead(request: Request, rank: int) -> int:
    """How many forward passes come before the first backward pass, beside the one that is paired with it: a group
    through all stages but the last, and twice the way to the last rank."""
    p, v = request.ranks, request.virtual
    return p - rank - 1 if v == 1 else p * (v - 1) + 2 * (p - rank - 1)
