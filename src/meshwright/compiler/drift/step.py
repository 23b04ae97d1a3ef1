"""One op of a run, and a run as the list of them."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from torch import Tensor

from meshwright.compiler.diagnostics import Origin

Key = tuple[str, str, int]
"""Module path, op without its variant, and how many of that op the module had before."""


@dataclass(frozen=True)
class Operand:
    """A tensor as an op is given or returns it."""

    dtype: str
    shape: tuple[int, ...]
    floating: bool = False
    ordered: bool = True
    """Whether its elements lie in memory in their order: it is no transposed view of another."""


@dataclass(frozen=True)
class Step:
    """An op that computes. Views and copies are none."""

    number: int
    key: Key
    op: str
    """With its variant, as ``aten.mm.default``."""
    place: Origin
    operands: tuple[Operand, ...]
    results: tuple[Operand, ...]
    numbers: tuple[Any, ...]
    """Arguments that are no tensors."""
    constants: dict[int, Tensor]
    """By number of the operand: those that depend on neither inputs nor weights."""
    sources: frozenset[int]
    """The steps that made its operands."""
    active: bool
    """Whether it depends on inputs or weights."""
    random: bool = False
    cast: bool = False
    chosen: bool = False
    """Whether the shape of its result depends on values."""
    value: Tensor | None = None
    """Its first result, if values were kept."""

    @property
    def name(self) -> str:
        """The op without its variant."""
        return self.key[1]

    @property
    def module(self) -> str:
        """The path of the module in whose ``forward`` it is."""
        return self.key[0]

    @property
    def dtype(self) -> str:
        """The floating dtype that it computes to; empty if to none."""
        return next((r.dtype for r in self.results if r.floating), "")


@dataclass
class Trace:
    """All ops of a run. ``live`` are those that outputs depend on."""

    steps: list[Step] = field(default_factory=list)
    live: set[int] = field(default_factory=set)
    ends: frozenset[int] = frozenset()
    """The steps that made the outputs."""
    drops: list[Origin] = field(default_factory=list)
    """Lines where training drops."""
    statistics: set[int] = field(default_factory=set)
    """Steps that buffers are written from: running statistics."""

    def computing(self) -> list[Step]:
        """The live steps that compute with inputs or weights, casts left out."""
        return [s for s in self.steps if s.number in self.live and s.active and not s.cast]

    @cached_property
    def users(self) -> dict[int, list[Step]]:
        """By step, the live ones that are given its result."""
        made: dict[int, list[Step]] = defaultdict(list)
        for step in self.steps:
            if step.number in self.live:
                for source in step.sources:
                    made[source].append(step)
        return made

    def by_key(self) -> dict[Key, Step]:
        """Steps by where they are."""
        return {s.key: s for s in self.steps if not s.cast}

    def mark(self, sources: frozenset[int], written: frozenset[int]) -> None:
        """Find what outputs depend on, and what buffers that were written do."""
        self.ends = sources
        self._reach(sources, self.live)
        self._reach(written, self.statistics)

    def fixed(self) -> set[tuple[str, str, int]]:
        """Ops, with their lines, that depend on neither inputs nor weights."""
        return {(s.name, s.place.file, s.place.line) for s in self.steps if not s.active}

    def _reach(self, sources: frozenset[int], found: set[int]) -> None:
        waiting = list(sources)
        while waiting:
            number = waiting.pop()
            if number not in found:
                found.add(number)
                waiting.extend(self.steps[number].sources)
