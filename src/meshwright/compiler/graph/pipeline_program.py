"""What the ranks of a pipeline run: for every stage its passes, and a table of which rank does what in which order."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from meshwright.compiler.graph.rank_program import LocalGraph, RankProgram
from meshwright.compiler.mesh import Mesh
from meshwright.compiler.schedules.instructions import Program
from meshwright.compiler.schedules.table import Schedule

PIPE = "pipe"
"""The mesh axis along which stages lie."""


@dataclass
class Stage:
    """One stage: its passes (``F``, ``I``, ``W``) and the rounds of its update."""

    passes: dict[str, LocalGraph]
    update: tuple[LocalGraph, ...]
    parameters: tuple[str, ...]
    state: tuple[str, ...]
    buffers: tuple[str, ...]
    takes: dict[tuple[str, str], tuple[int, str]] = field(default_factory=dict)
    """By pass and value that comes in: the stage and pass that makes it."""
    hands_over: dict[tuple[int, str], tuple[int, int]] = field(default_factory=dict)
    """By round of the update and value that comes in: the stage and round that makes it."""


@dataclass
class PipelineProgram:
    """``whole`` is the program of a rank that had all stages, on a mesh without ``pipe``."""

    whole: RankProgram
    mesh: Mesh
    stages: tuple[Stage, ...]
    schedule: Schedule
    programs: tuple[Program, ...]
    """By ``pipe`` coordinate."""
    copies: Mapping[str, str] = field(default_factory=dict)
    """Further copies of tied parameters, each with the parameter's name."""

    def held_by(self, rank: int) -> tuple[int, ...]:
        """The stages of a ``pipe`` coordinate."""
        return tuple(stage for _, stage in self.schedule.stages_of(rank))
