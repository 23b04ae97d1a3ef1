"""ZB-H2 (Qi et al. 2023): twice the forward passes ahead of 1F1B, so that nothing waits if all passes take the same."""

from __future__ import annotations

from meshwright.compiler.schedules.request import Request
from meshwright.compiler.schedules.table import Schedule
from meshwright.compiler.schedules.zero_bubble_h1 import with_late_weights

NAME = "zb-h2"
VIRTUAL = 1
EXACT = True
"""One stage on each rank."""


def schedule(request: Request) -> Schedule:
    """Bubble: ``(p-1)(F+I-2W)``, of each rank from its first action to its last. In flight: ``min(m, 2p-1)``."""
    return with_late_weights(NAME, request, 2)
