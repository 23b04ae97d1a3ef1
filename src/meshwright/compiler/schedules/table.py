"""The table of a pipeline schedule: what every rank computes in which order. It prints, parses, and is what runs.

An action is written as the stage, what is done, and the microbatch: ``2F0`` is stage 2's forward pass of microbatch 0,
``B`` its whole backward pass, ``I`` the part that gives the gradient of the stage's input, ``W`` that of its weights.
Two actions that are computed side by side are joined: ``2F3+5B1``.

Where microbatches meet within a pass, it goes in rounds: ``2F1.0`` is what stage 2's forward pass of microbatch 0 does
after its first meeting. The tables of the catalogue have no rounds; :mod:`meshwright.compiler.schedules.rounds` writes
them in.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

Kind = str
"""``F``, ``B``, ``I`` or ``W``; of a later round its number behind it: ``F1``."""
_TOKEN = re.compile(r"(\d+)([FBIW])(?:([1-9]\d*)\.)?(\d+)")


class Action(NamedTuple):
    """One pass of one microbatch through one stage. A tuple, since a search compares millions of them."""

    kind: Kind
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{'.' if self.kind[1:] else ''}{self.microbatch}"

    @property
    def passes(self) -> tuple[Action, ...]:
        """The passes that it stands for: of a whole backward pass two."""
        if self.kind != "B":
            return (self,)
        return Action("I", self.stage, self.microbatch), Action("W", self.stage, self.microbatch)


Step = tuple[Action, ...]
"""What a rank does at once: one action, or two side by side."""
Row = tuple[Step, ...]
Links = Mapping[tuple[int, str], Collection[tuple[int, str]]]
"""By stage and pass (``F``, ``I``, ``W``): passes that make something it reads."""


@dataclass(frozen=True)
class Rounds:
    """What has to be done before what, where passes go in rounds. ``reads`` has by pass those of the same microbatch,
    ``meets`` by pass that begins with a meeting those that all microbatches must have done."""

    reads: Links
    meets: Links


@dataclass(frozen=True)
class Schedule:
    """What every rank does. ``placement``: for each direction that microbatches go through the pipeline, the rank of
    each stage. With two directions, the second half of the microbatches takes the second; every stage is then held
    twice."""

    name: str
    placement: tuple[tuple[int, ...], ...]
    microbatches: int
    rows: tuple[Row, ...]
    rounds: Rounds | None = None
    """Where microbatches meet; else every pass waits for its neighbours."""

    @property
    def stages(self) -> int:
        return len(self.placement[0])

    @property
    def ranks(self) -> int:
        return len(self.rows)

    def direction(self, microbatch: int) -> int:
        """Which way a microbatch goes."""
        return microbatch * len(self.placement) // self.microbatches

    @property
    def apart(self) -> bool:
        """Whether gradients of weights are computed apart from those of inputs; else all backward passes are whole."""
        return any(action.kind == "W" for row in self.rows for step in row for action in step)

    def rank(self, action: Action) -> int:
        """The rank that an action belongs to."""
        return self.placement[self.direction(action.microbatch)][action.stage]

    def stages_of(self, rank: int) -> tuple[tuple[int, int], ...]:
        """The stages that a rank holds, each with its direction."""
        return tuple((d, s) for d, ranks in enumerate(self.placement) for s, r in enumerate(ranks) if r == rank)

    def actions(self, rank: int) -> Iterator[Action]:
        """All actions of a rank, in order."""
        return (action for step in self.rows[rank] for action in step)

    def __str__(self) -> str:
        """One line for each rank; :func:`parse_rows` reads them back."""
        return "\n".join(" ".join("+".join(map(str, step)) for step in row) for row in self.rows)


class Malformed(ValueError):
    """A text is no schedule's table. ``line`` and ``column`` count from 1."""

    def __init__(self, message: str, line: int, column: int, length: int = 1) -> None:
        super().__init__(message)
        self.line, self.column, self.length = line, column, length


def parse_rows(text: str) -> tuple[Row, ...]:
    """The rows of a printed table; ``#`` begins a comment, lines without actions are none. Raises Malformed."""
    rows = []
    for number, line in enumerate(text.splitlines(), 1):
        words = list(re.finditer(r"\S+", line.partition("#")[0]))
        if words:
            rows.append(tuple(_step(word.group(), number, word.start() + 1) for word in words))
    return tuple(rows)


def _step(word: str, line: int, column: int) -> Step:
    step = []
    for part in word.split("+"):
        found = _TOKEN.fullmatch(part)
        if found is None:
            raise Malformed(f"'{part}' is no action: write {' or '.join(_EXAMPLES)}", line, column, len(word))
        stage, kind, number, microbatch = found.groups(default="")
        step.append(Action(kind + number, int(stage), int(microbatch)))
    return tuple(step)


_EXAMPLES = [f"0{kind}2" for kind in "FBIW"]


def alternate(first: Sequence[Action], second: Sequence[Action], ahead: int) -> list[Action]:
    """``ahead`` of the first, then one of each in turn as long as there are both, then what is left of the second."""
    ahead = min(ahead, len(first))
    found = list(first[:ahead])
    for index, action in enumerate(second):
        if ahead + index < len(first):
            found.append(first[ahead + index])
        found.append(action)
    return found


def single(actions: Sequence[Action]) -> Row:
    """The row of actions none of which runs beside another."""
    return tuple((action,) for action in actions)


def only(rows: Sequence[Row], microbatches: int) -> tuple[Row, ...]:
    """The rows without microbatches from a number on: how a schedule that is written for more serves fewer."""
    steps = (tuple(tuple(a for a in step if a.microbatch < microbatches) for step in row) for row in rows)
    return tuple(tuple(step for step in row if step) for row in steps)
