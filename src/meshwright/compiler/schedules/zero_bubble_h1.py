"""ZB-H1 (Qi et al. 2023): 1F1B whose gradients of the weights come later, where the pipeline would wait."""

from __future__ import annotations

from collections.abc import Sequence

from meshwright.compiler.schedules.request import Request
from meshwright.compiler.schedules.table import Action, Schedule, alternate, single

NAME = "zb-h1"
VIRTUAL = 1
EXACT = True
"""One stage on each rank."""


def schedule(request: Request) -> Schedule:
    """Bubble: ``(p-1)(F+I-W)``. In flight, weights' gradients included: ``min(m, p)``, as 1F1B's first rank has."""
    return with_late_weights(NAME, request, 1)


def with_late_weights(name: str, request: Request, times: int) -> Schedule:
    """So many times 1F1B's forward passes ahead, and gradients of the weights as much later as the rank is further down
    the pipeline."""
    p, m = request.ranks, request.microbatches
    rows = []
    for r in range(p):
        forward, backward = [Action("F", r, i) for i in range(m)], [Action("B", r, i) for i in range(m)]
        rows.append(single(late_weights(alternate(forward, backward, times * (p - r - 1)), times * r)))
    return Schedule(name, (tuple(range(p)),), m, tuple(rows))


def late_weights(actions: Sequence[Action], late: int) -> list[Action]:
    """Every backward pass in two: that of the input in its place, that of the weights ``late`` of them later."""
    found: list[Action] = []
    waiting: list[Action] = []
    for action in actions:
        if action.kind != "B":
            found.append(action)
            continue
        found.append(Action("I", action.stage, action.microbatch))
        waiting.append(Action("W", action.stage, action.microbatch))
        if len(waiting) > late:
            found.append(waiting.pop(0))
    return found + waiting
