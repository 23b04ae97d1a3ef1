"""1F1B (PipeDream-Flush, Narayanan et al. 2021): forward passes that fill the pipeline, then one of each in turn."""

from __future__ import annotations

from meshwright.compiler.schedules.request import Request
from meshwright.compiler.schedules.table import Action, Schedule, alternate, single

NAME = "1f1b"
VIRTUAL = 1
EXACT = True
"""One stage on each rank."""


def schedule(request: Request) -> Schedule:
    """Bubble: ``(p-1)/(m+p-1)`` of the step. In flight: ``min(m, p-r)`` on rank ``r``."""
    p, m = request.ranks, request.microbatches
    rows = [
        alternate([Action("F", r, i) for i in range(m)], [Action("B", r, i) for i in range(m)], p - r - 1)
        for r in range(p)
    ]
    return Schedule(NAME, (tuple(range(p)),), m, tuple(map(single, rows)))
