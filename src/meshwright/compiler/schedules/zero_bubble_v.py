"""ZB-V (Qi et al. 2024): two stages on each rank, the way down and up again, so that the first rank has the last stage.

With it all ranks hold the same, no more than 1F1B's first rank, and nothing waits if all passes take the same.
"""

from __future__ import annotations

from meshwright.compiler.schedules.request import Request
from meshwright.compiler.schedules.table import Action, Kind, Schedule, only, single

NAME = "zb-v"
VIRTUAL = 2
EXACT = True
"""Neither more nor fewer stages on each rank."""


def schedule(request: Request) -> Schedule:
    """Bubble: none, of each rank from its first action to its last, if all passes take the same. In flight: ``2p``
    (stages are half as long as without)."""
    p, m = request.ranks, request.microbatches
    rows = [single(_row(r, p, max(m, 2 * p - 1))) for r in range(p)]
    return Schedule(NAME, ((*range(p), *reversed(range(p))),), m, only(rows, m))


def _row(rank: int, ranks: int, count: int) -> list[Action]:
    down, up = rank, 2 * ranks - 1 - rank
    row: list[Action] = []
    done: dict[tuple[Kind, int], int] = {}

    def add(*passes: tuple[Kind, int]) -> None:
        for one in passes:
            number = done.get(one, 0)
            if number < count:
                row.append(Action(*one, number))
                done[one] = number + 1

    far = ranks - rank
    for _ in range(2 * far - 1):
        add(("F", down))
    for _ in range(rank):
        add(("F", up), ("F", down))
    for _ in range(far):
        add(("F", up), ("I", up), ("W", up))
    while done.get(("F", up), 0) < count:
        add(("F", down), ("I", down), ("W", down), ("F", up), ("I", up), ("W", up))
    for _ in range(rank):
        add(("I", down), ("I", up))
    for _ in range(far):
        add(("I", down), ("W", down))
    for _ in range(rank):
        add(("W", up), ("W", down))
    return row
