"""DualPipe (DeepSeek-V3 2024): two pipelines through the same ranks in opposite directions, each with all weights.

Half of the microbatches goes each way, and a forward pass of one runs beside a backward pass of the other.
"""

from __future__ import annotations

from meshwright.compiler.schedules.dual_pipe_v import Make, row
from meshwright.compiler.schedules.request import Request
from meshwright.compiler.schedules.table import Action, Schedule, only

NAME = "dualpipe"
VIRTUAL = 1
EXACT = True
"""One stage on each rank."""
EVEN = True
"""The number of ranks must be even."""


def schedule(request: Request) -> Schedule:
    """Bubble: ``(p/2-1)(F&B + B - 3W)``, where ``F&B`` is what both take side by side. In flight: ``p + 1``."""
    p, m = request.ranks, request.microbatches
    half = -(-m // 2)
    padded = max(half, p)
    rows = []
    for r in range(p):
        near = min(r, p - 1 - r)
        rows.append(row(near, p // 2, padded, _maker(r, p, half)))
    way = tuple(range(p))
    return Schedule(NAME, (way, way[::-1]), m, only(rows, m))


def _maker(rank: int, ranks: int, half: int) -> Make:
    """Of the ranks in the second half, the second direction is the first phase."""
    second = 2 * rank >= ranks

    def make(kind: str, phase: int, number: int) -> Action:
        direction = phase ^ second
        stage = ranks - 1 - rank if direction else rank
        # those that only fill up come behind all others
        microbatch = number + direction * half if number < half else 2 * half + number
        return Action(kind, stage, microbatch)

    return make
