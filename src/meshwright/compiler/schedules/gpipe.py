"""GPipe (Huang et al. 2019): all forward passes, then all backward passes. All activations are held at once."""

from __future__ import annotations

from meshwright.compiler.schedules.request import Request
from meshwright.compiler.schedules.table import Action, Schedule, single

NAME = "gpipe"
VIRTUAL = 1
EXACT = True
"""One stage on each rank."""


def schedule(request: Request) -> Schedule:
    """Bubble: ``(p-1)/(m+p-1)`` of the step. In flight: ``m``."""
    p, m = request.ranks, request.microbatches
    rows = [[Action("F", stage, i) for i in range(m)] + [Action("B", stage, i) for i in range(m)] for stage in range(p)]
    return Schedule(NAME, (tuple(range(p)),), m, tuple(map(single, rows)))
