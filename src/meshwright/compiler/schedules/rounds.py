"""A schedule whose passes go in rounds, since microbatches meet within them.

A pass of a microbatch runs up to its first meeting where the table has it. When the last microbatch of a stage has come
there, they meet, and all go on, one round after the other, before the rank does what stands next in its row. That comes
to an end if the table lets all microbatches of that stage go forward before one goes back.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace

from meshwright.compiler.schedules.table import Action, Rounds, Row, Schedule, Step

FAMILIES = "FIW"
"""What a pass is, whichever its round: forward, the gradient of the input, those of the weights."""


def in_rounds(schedule: Schedule, rounds: Rounds) -> Schedule:
    """The schedule with the rounds of all passes in it. It may be one that does not come to an end."""
    late: dict[int, list[str]] = defaultdict(list)
    for stage, kind in rounds.reads:
        if kind[1:]:
            late[stage].append(kind)
    for kinds in late.values():
        kinds.sort(key=round_of)
    return replace(schedule, rows=tuple(_row(row, late) for row in schedule.rows), rounds=rounds)


def lets_meet(schedule: Schedule) -> bool:
    """Whether at every stage all microbatches go forward before one goes back, on one rank, so that they can meet."""
    for row in schedule.rows:
        back: set[int] = set()
        for action in (action for step in row for action in step):
            if action.kind != "F":
                back.add(action.stage)
            elif action.stage in back:
                return False
    return len(schedule.placement) == 1


def expected(stages: Sequence[tuple[tuple[int, int], bool]]) -> Rounds | None:
    """What passes wait for where as much is known of each stage as a prediction needs: in how many rounds it goes
    forward and back, and whether microbatches meet in its forward pass beside what goes on to the next stage. None
    where they do not meet at all."""
    reads: dict[tuple[int, str], tuple[tuple[int, str], ...]] = {}
    meets: dict[tuple[int, str], tuple[tuple[int, str], ...]] = {}
    last = {
        s: ("F1" if forward > 1 else "F", "I1" if back > 1 else "I") for s, ((forward, back), _) in enumerate(stages)
    }
    for s, ((forward, back), aside) in enumerate(stages):
        own, end = last[s]
        reads[s, "F"] = ((s - 1, last[s - 1][0]),) if s else ()
        reads[s, "I"] = ((s, own), *([(s + 1, last[s + 1][1])] if s + 1 in last else []))
        reads[s, "W"] = ((s, end),)
        if aside:
            meets[s, "I"] = ((s, own),)
        for family, count in (("F", forward), ("I", back)):
            if count > 1:
                reads[s, f"{family}1"] = meets[s, f"{family}1"] = ((s, family),)
    return Rounds(reads, meets) if meets else None


def round_of(kind: str) -> tuple[int, int]:
    """By which passes of a stage come one after the other: ``F``, ``F1``, ``I``, ..."""
    return FAMILIES.index(kind[0]), int(kind[1:] or 0)


def _row(row: Row, late: dict[int, list[str]]) -> Row:
    """The row of a rank; ``late`` has the later rounds of each stage, in order."""
    last: dict[tuple[int, str], int] = {}
    order: dict[tuple[int, str], list[int]] = defaultdict(list)
    for place, step in enumerate(row):
        for action in step:
            for one in action.passes:
                last[one.stage, one.kind] = place
                order[one.stage, one.kind].append(one.microbatch)
    found: list[Step] = []
    for place, step in enumerate(row):
        kept = tuple(other for action in step for other in _first_round(action, late.get(action.stage, ())))
        found += [kept] if kept else []
        for stage in dict.fromkeys(action.stage for action in step):
            for family in FAMILIES:
                if last.get((stage, family)) == place:
                    found += _later(stage, family, late.get(stage, ()), order)
    return tuple(found)


def _first_round(action: Action, late: Sequence[str]) -> Iterator[Action]:
    """What stays of an action where it stands. Gradients of weights wait for the last round of those of inputs."""
    if not any(kind[0] == "I" for kind in late):
        yield action
    elif action.kind != "W":
        yield action.passes[0] if action.kind == "B" else action


def _later(stage: int, family: str, late: Sequence[str], order: dict[tuple[int, str], list[int]]) -> Iterator[Step]:
    """The rounds after the first, each for all microbatches in the order in which they came."""
    waits = family == "W" and any(kind[0] == "I" for kind in late)
    for kind in (*(["W"] if waits else []), *(kind for kind in late if kind[0] == family)):
        for microbatch in order[stage, family]:
            yield (Action(kind, stage, microbatch),)
