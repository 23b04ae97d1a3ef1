"""ZB-H2 (Qi et al. 2023): twice the forward passes ahead of 1F1B, so that nothing waits if all passes take the same."""

from __future__ import annotations

from meshwright.compiler.schedules.request import Request
from meshwright.compiler.schedules.table import Action, Schedule, alternate, single
from meshwright.compiler.schedules.zero_bubble_h1 import late_weights

NAME = "zb-h2"
VIRTUAL = 1
EXACT = True
"""One stage on each rank."""


def schedule(request: Request) -> Schedule:
    """Bubble: ``(p-1)(F+I-2W)``, of each rank from its first action to its last. In flight: ``min(m, 2p-1)``."""
    p, m = request.ranks, request.microbatches
    rows = []
    for r in range(p):
        forward, backward = [Action("F", r, i) for i in range(m)], [Action("B", r, i) for i in range(m)]
        rows.append(single(late_weights(alternate(forward, backward, 2 * (p - r - 1)), 2 * r)))
    return Schedule(NAME, (tuple(range(p)),), m, tuple(rows))
