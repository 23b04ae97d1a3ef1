"""The forward pass of a compiled step, as far as it leads to some of its nodes: one graph, or that of each stage."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import fx

from meshwright.compiler.graph.pipeline_program import Compiled, PipelineProgram
from meshwright.compiler.graph.program import Value
from meshwright.compiler.graph.rank_program import LocalGraph


@dataclass(frozen=True)
class Piece:
    """A graph that runs forward: that of a stage, or the only one; and those of its nodes that matter."""

    stage: int
    kind: str
    """The pass of the stage: ``F``, or one of its rounds."""
    graph: LocalGraph
    nodes: tuple[fx.Node, ...]
    inputs: Mapping[Value, fx.Node]
    gives: Mapping[str, fx.Node] = field(default_factory=dict)
    """What later pieces read, by name."""
    takes: Mapping[str, tuple[int, str]] = field(default_factory=dict)
    """By value that comes from another piece: its stage and pass."""


def forward_pieces(compiled: Compiled, roots: Collection[str]) -> list[Piece]:
    """All pieces, stage by stage, with what leads to the nodes that are named as ``roots``."""
    if not isinstance(compiled, PipelineProgram):
        return [_piece(0, "F", compiled.micro, roots, frozenset())]
    made: list[Piece] = []
    demanded: set[str] = set()
    for number, stage in reversed(list(enumerate(compiled.stages))):
        for kind in [kind for kind in reversed(stage.passes) if kind[0] == "F"]:
            piece = _piece(number, kind, stage.passes[kind], roots, demanded)
            takes = {v.name: stage.takes[kind, v.name] for v in piece.inputs if v.kind == "value"}
            demanded.update(takes)
            made.append(replace(piece, takes=takes))
    return made[::-1]


def _piece(stage: int, kind: str, local: LocalGraph, roots: Collection[str], demanded: Collection[str]) -> Piece:
    graph = local.module.graph
    (output,) = graph.find_nodes(op="output")
    returned = zip(local.signature.outputs, output.args[0], strict=True)
    gives = {v.name: n for v, n in returned if v.kind == "value" and v.name in demanded}
    kept = _ancestors(
        [*gives.values(), *(n for n in graph.nodes if n.op == "call_function" and n.name in roots)], graph.nodes
    )
    roles = zip(local.signature.inputs, graph.find_nodes(op="placeholder"), strict=True)
    return Piece(stage, kind, local, kept, {v: n for v, n in roles if n in kept}, gives)


def _ancestors(roots: list[fx.Node], order: Any) -> tuple[fx.Node, ...]:
    found, waiting = set(roots), list(roots)
    while waiting:
        new = [n for n in waiting.pop().all_input_nodes if n not in found]
        found.update(new)
        waiting.extend(new)
    return tuple(n for n in order if n in found)
