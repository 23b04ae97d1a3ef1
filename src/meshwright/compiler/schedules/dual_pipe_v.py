"""DualPipeV (DeepSeek 2025): ZB-V's placement, with a forward and a backward pass of two microbatches side by side.

While one computes, the other may communicate.
"""

from __future__ import annotations

from collections.abc import Callable

from meshwright.compiler.schedules.request import Request
from meshwright.compiler.schedules.table import Action, Kind, Row, Schedule, Step, only

NAME = "dualpipe-v"
VIRTUAL = 2
EXACT = True
"""Neither more nor fewer stages on each rank."""
Make = Callable[[Kind, int, int], Action]
"""An action by its kind, its phase (0: entered here first, 1: the other one) and its number within the phase."""


def schedule(request: Request) -> Schedule:
    """In flight: ``2p + 1`` stages, half as long as without."""
    p, m = request.ranks, request.microbatches
    rows = [row(r, p, max(m, 2 * p), _maker(r, p)) for r in range(p)]
    return Schedule(NAME, ((*range(p), *reversed(range(p))),), m, only(rows, m))


def _maker(rank: int, ranks: int) -> Make:
    return lambda kind, phase, number: Action(kind, 2 * ranks - 1 - rank if phase else rank, number)


def row(rank: int, ranks: int, count: int, make: Make) -> Row:
    """What the rank that is ``rank`` away from the pipeline's end does with ``count`` passes of each phase. At the
    other end, ``ranks`` away, a microbatch changes from one phase to the other."""
    steps: list[Step] = []
    numbers: dict[tuple[str, int], int] = {}
    waiting: list[tuple[int, int]] = []
    far = ranks - rank - 1

    def next_of(kind: Kind, phase: int) -> Action:
        """The next pass of a kind; whole and split backward passes are counted together."""
        key = ("F" if kind == "F" else "B", phase)
        number = numbers.get(key, 0)
        numbers[key] = number + 1
        return make(kind, phase, number)

    def forward(phase: int) -> None:
        steps.append((next_of("F", phase),))

    def backward(phase: int, late: bool) -> None:
        """With ``late`` the weights' gradients come when :func:`weight` is called."""
        number = numbers.get(("B", phase), 0)
        steps.append((next_of("I" if late else "B", phase),))
        if late:
            waiting.append((phase, number))

    def weight() -> None:
        steps.append((make("W", *waiting.pop(0)),))

    def both(one: int, other: int) -> None:
        steps.append((next_of("F", one), next_of("B", other)))

    for _ in range(2 * far):
        forward(0)
    for _ in range(rank + 1):
        forward(0)
        forward(1)
    for _ in range(far):
        backward(1, late=True)
        weight()
        forward(1)
    for index in range(count - 2 * ranks + rank + 1):
        if index == 0 and far == 0:
            # here the backward pass waits for the very forward pass before it
            forward(0)
            backward(1, late=False)
        else:
            both(0, 1)
        both(1, 0)
    for _ in range(far):
        backward(1, late=False)
        both(1, 0)
    half = (rank + 1) // 2
    for index in range(rank + 1):
        backward(1, late=index >= half + (rank + 1) % 2 or (index == half and rank % 2 == 1))
        backward(0, late=index >= half)
    for _ in range(far):
        weight()
        backward(0, late=True)
    for _ in range(rank + 1):
        weight()
    return tuple(steps)
