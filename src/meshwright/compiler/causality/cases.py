"""A leak that two runs show, and what a search came to know."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from meshwright.compiler.causality.comparing import distances, protected
from meshwright.compiler.causality.edits import Edit
from meshwright.compiler.causality.feed import Feed
from meshwright.compiler.causality.running import Ran
from meshwright.compiler.causality.state import State


@dataclass(frozen=True)
class Case:
    """Two runs that differ where they must not."""

    kind: str
    feed: Feed
    values_a: list[Tensor]
    values_b: list[Tensor]
    edit: Edit
    output: tuple[int, int]
    which: int
    difference: float
    weights: tuple[float, float, int]
    wide: bool = True
    """Whether the runs were in float64."""
    state: State | None = None
    """What the model held before each run; None for that which it was given with."""
    calls: int = 0
    """How many calls had left it so."""


@dataclass
class Found:
    """What the search came to know."""

    leaks: dict[str, Case] = field(default_factory=dict)
    rounding: dict[str, float] = field(default_factory=dict)
    tests: int = 0
    """Pairs that compared numbers where a difference is not allowed."""
    runs: int = 0
    """Runs made, telling or not."""
    finite: bool = False
    """Whether any output was a number."""
    features: dict[int, Tensor] = field(default_factory=dict)
    """Of each output, which features were ever numbers."""
    unsteady: bool = False
    """Whether runs of the same tokens differed."""
    truths: dict[tuple[str, int], set[str]] = field(default_factory=dict)
    """What was read off tensors at each line of the user's, if true or false."""
    ways: dict[tuple[int, int], set[int]] = field(default_factory=dict)
    """By size, the ways that runs went."""

    def varied(self, file: str, line: int) -> bool:
        """Whether runs went different ways after what they read at a line."""
        met = self.truths.get((file, line), set())
        if met <= {"True", "False"} and met:
            return len(met) == 2
        return any(len(ways) > 1 for ways in self.ways.values())

    def note(self, feed: Feed, ran: Ran) -> None:
        """Keep which way a run went."""
        self.ways.setdefault((feed.rows, feed.length), set()).add(ran.way)
        for file, line, truth in ran.read:
            self.truths.setdefault((file, line), set()).add(truth)


@dataclass(frozen=True)
class Effort:
    """How long to look."""

    pairs: int
    seconds: float
    strong_weights: bool = True


def apart_in(case: Case, a: Ran, b: Ran) -> Tensor:
    """``[rows, positions]``: how far outputs are apart that the change must not reach."""
    one, other = a.outputs[case.which], b.outputs[case.which]
    if one.shape != other.shape:
        return torch.zeros((0, 0))
    far = distances(one, other).far
    return torch.where(protected(case.feed, case.edit, far.shape[1], a.offsets[case.which])[case.kind], far, 0.0)


def worst_in(case: Case, a: Ran, b: Ran) -> float:
    far = apart_in(case, a, b)
    return float(far.max()) if far.numel() else 0.0
