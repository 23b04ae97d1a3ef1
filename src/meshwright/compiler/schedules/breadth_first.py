"""Breadth-first (Lamy-Poirier 2023): all microbatches go through a rank's first stage before its next one.

A rank's weights are then gathered once for each stage and pass, whatever the number of microbatches.
"""

from __future__ import annotations

from meshwright.compiler.schedules.request import Request
from meshwright.compiler.schedules.table import Action, Schedule, single

NAME = "breadth-first"
VIRTUAL = 2


def schedule(request: Request) -> Schedule:
    """Bubble: that of GPipe divided by ``v``. In flight: ``v m``."""
    p, m, v = request.ranks, request.microbatches, request.virtual
    rows = []
    for r in range(p):
        stages = [r + p * j for j in range(v)]
        row = [Action("F", s, i) for s in stages for i in range(m)]
        row += [Action("B", s, i) for s in reversed(stages) for i in range(m)]
        rows.append(single(row))
    return Schedule(NAME, (tuple(s % p for s in range(v * p)),), m, tuple(rows))
