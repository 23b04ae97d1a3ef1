"""What the ranks of a pipeline run: for every stage its passes, and a table of which rank does what in which order."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from meshwright.compiler.graph.program import StepProgram, Value
from meshwright.compiler.graph.rank_program import Layout, LocalGraph, RankProgram
from meshwright.compiler.mesh import Mesh, Sharding
from meshwright.compiler.plan import Plan
from meshwright.compiler.schedules.instructions import Program
from meshwright.compiler.schedules.table import Schedule


@dataclass
class Stage:
    """One stage: its passes (``F``, ``I``, ``W``) and the rounds of its update."""

    passes: dict[str, LocalGraph]
    update: tuple[LocalGraph, ...]
    parameters: tuple[str, ...]
    state: tuple[str, ...]
    takes: dict[tuple[str, str], tuple[int, str]] = field(default_factory=dict)
    """By pass and value that comes in: the stage and pass that makes it."""
    hands_over: dict[tuple[int, str], tuple[int, int]] = field(default_factory=dict)
    """By round of the update and value that comes in: the stage and round that makes it."""


@dataclass
class PipelineProgram:
    """All that the ranks of a pipeline need; each runs the stages that its ``pipe`` coordinate has."""

    program: StepProgram
    """The step for one device that this was made from."""
    plan: Plan
    mesh: Mesh
    """The device mesh, with ``pipe``."""
    prologue: LocalGraph
    stages: tuple[Stage, ...]
    schedule: Schedule
    programs: tuple[Program, ...]
    """By ``pipe`` coordinate."""
    layouts: dict[str, Layout]
    """By parameter name, further copies of tied ones too."""
    state: dict[str, Sharding]
    copies: Mapping[str, str] = field(default_factory=dict)
    """Further copies of tied parameters, each with the parameter's name."""

    @property
    def micro_graphs(self) -> tuple[LocalGraph, ...]:
        """The graphs that run once for each microbatch."""
        return tuple(graph for stage in self.stages for graph in stage.passes.values())

    @property
    def update_graphs(self) -> tuple[LocalGraph, ...]:
        """The graphs that run once at the end of a step."""
        return tuple(graph for stage in self.stages for graph in stage.update)

    @property
    def graphs(self) -> tuple[LocalGraph, ...]:
        return (self.prologue, *self.micro_graphs, *self.update_graphs)

    def held_by(self, pipe: int) -> tuple[int, ...]:
        """The stages of a ``pipe`` coordinate."""
        return tuple(dict.fromkeys(stage for _, stage in self.schedule.stages_of(pipe)))

    def holders_of(self, stage: int) -> tuple[int, ...]:
        """The ``pipe`` coordinates that hold a stage, one for each direction in which microbatches go; first the one
        that updates it."""
        return tuple(dict.fromkeys(ranks[stage] for ranks in self.schedule.placement))

    def updated_by(self, pipe: int) -> tuple[int, ...]:
        """The stages that a ``pipe`` coordinate updates; of other stages that it holds it is given the new weights."""
        return tuple(stage for stage in range(len(self.stages)) if self.holders_of(stage)[0] == pipe)

    def holders(self, value: Value) -> tuple[int, ...]:
        """The ``pipe`` coordinates that hold a parameter, a buffer or an entry of the optimizer's state between steps;
        first one that changes it."""
        return self._holders[value]

    @cached_property
    def _holders(self) -> dict[Value, tuple[int, ...]]:
        found: dict[Value, dict[int, None]] = {}
        changed = [(v, s) for s, stage in enumerate(self.stages) for v in _buffers(stage, written=True)]
        read = [(v, s) for s, stage in enumerate(self.stages) for v in _buffers(stage, written=False)]
        unread = [(Value("buffer", name), 0) for name in self.program.buffers]
        for number, stage in enumerate(self.stages):
            changed += [(Value("parameter", name), number) for name in stage.parameters]
            found |= {Value("state", name): dict.fromkeys(self.holders_of(number)[:1]) for name in stage.state}
        for value, number in (*changed, *read):
            found.setdefault(value, {}).update(dict.fromkeys(self.holders_of(number)))
        for value, number in unread:
            found.setdefault(value, dict.fromkeys(self.holders_of(number)))
        return {value: tuple(ranks) for value, ranks in found.items()}


Compiled = RankProgram | PipelineProgram
"""What a plan makes of a step."""


def copies_of(compiled: Compiled) -> Mapping[str, str]:
    """Further copies of tied parameters that stages have, each with the parameter's name."""
    return compiled.copies if isinstance(compiled, PipelineProgram) else {}


def _buffers(stage: Stage, *, written: bool) -> Iterator[Value]:
    for graph in stage.passes.values():
        values = graph.signature.outputs if written else graph.signature.inputs
        yield from (value for value in values if value.kind == "buffer")
