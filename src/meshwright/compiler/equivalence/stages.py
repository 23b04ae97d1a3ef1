"""The graphs of a compiled step as pieces that read each other's values: one for all ranks, or many of a pipeline."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field

from meshwright.compiler.graph.pipeline_program import Compiled, PipelineProgram
from meshwright.compiler.graph.rank_program import LocalGraph

KINDS = {"F": "forward", "I": "input gradient", "W": "weight gradients"}


@dataclass(frozen=True)
class Piece:
    """A graph; ``takes`` says by value that comes in which piece makes it."""

    name: str
    graph: LocalGraph
    place: Hashable = ""
    takes: Mapping[str, Hashable] = field(default_factory=dict)
    holds: frozenset[str] | None = None
    """The parameters that the ranks which run it hold; None: all."""


def micro_pieces(compiled: Compiled) -> list[Piece]:
    """What runs once for each microbatch."""
    if not isinstance(compiled, PipelineProgram):
        return [Piece("micro", compiled.micro)]
    found = []
    for number, stage in enumerate(compiled.stages):
        for kind, graph in stage.passes.items():
            takes = {value: origin for (own, value), origin in stage.takes.items() if own == kind}
            name = f"stage {number}, {KINDS[kind[0]]}" + (f" after meeting {kind[1:]}" if kind[1:] else "")
            found.append(Piece(name, graph, (number, kind), takes, frozenset(stage.parameters)))
    return found


def update_pieces(compiled: Compiled) -> list[Piece]:
    """What runs at the end of a step."""
    if not isinstance(compiled, PipelineProgram):
        return [Piece("update", compiled.update)]
    found = []
    for number, stage in enumerate(compiled.stages):
        for at, graph in enumerate(stage.update):
            takes = {value: origin for (own, value), origin in stage.hands_over.items() if own == at}
            name = f"stage {number}, update" + (f", round {at}" if len(stage.update) > 1 else "")
            found.append(Piece(name, graph, (number, at), takes, frozenset(stage.parameters)))
    return found


def in_order(pieces: list[Piece]) -> tuple[list[Piece], list[Piece]]:
    """The pieces, each behind those whose values it takes; and those for which that cannot be."""
    done: dict[Hashable, None] = {}
    found: list[Piece] = []
    waiting = list(pieces)
    while waiting:
        ready = [p for p in waiting if all(o in done or o == p.place for o in p.takes.values())]
        if not ready:
            return found, waiting
        found += ready
        done |= {p.place: None for p in ready}
        waiting = [p for p in waiting if p.place not in done]
    return found, []
