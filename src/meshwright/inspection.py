"""What an artefact is made of and what a step of it needs: what ``meshwright inspect`` shows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from meshwright.compiler.analysis.rank_instructions import rank_instructions
from meshwright.compiler.analysis.summarize import summarize, summarize_graph
from meshwright.compiler.cluster.cluster_file import read_cluster
from meshwright.compiler.cluster.presets import LOCAL
from meshwright.compiler.communication import Traffic, communication, graph_traffic
from meshwright.compiler.emit.artefact import Artefact, read_artefact
from meshwright.compiler.emit.parts import graphs_of
from meshwright.compiler.graph.pipeline_program import PipelineProgram
from meshwright.compiler.graph.program import Graph
from meshwright.compiler.graph.rank_program import LocalGraph
from meshwright.compiler.memory import memory
from meshwright.compiler.passes.verify_shapes import lay_out
from meshwright.compiler.plan import PIPE
from meshwright.compiler.prediction import Flow, Memory
from meshwright.compiler.schedules.instructions import Collective, Exchange
from meshwright.prediction_of import predict_step

SCALAR = 8
"""Bytes of a loss or a norm as it is summed over stages."""


@dataclass(frozen=True)
class Inspected:
    """An artefact with what was found out about it."""

    artefact: Artefact
    memory: Memory
    """Of a rank; of a pipeline, of the one that needs most."""
    traffic: list[Traffic]
    """Collectives of a rank in one step; of a pipeline, those of each stage."""
    graphs: dict[str, int]
    """By graph of a rank (of a pipeline, of each stage), its ops."""
    whole: dict[str, int]
    """By graph of the step for one device, its ops."""
    flow: Flow | None = None
    """Of a pipeline."""


def inspect_artefact(folder: str | Path) -> Inspected:
    """Read an artefact and find out what it needs. Raises MeshwrightError E064x for one that cannot be read."""
    artefact = read_artefact(folder)
    compiled = artefact.rank_program
    lay_out(compiled)
    whole = {name: _ops(getattr(compiled.program, name)) for name in ("prologue", "micro", "update")}
    graphs = {name: _ops(graph) for name, graph in graphs_of(compiled).items()}
    if isinstance(compiled, PipelineProgram):
        # the times are not told here, so that any cluster will do
        found = predict_step(compiled.program, compiled.plan, read_cluster(LOCAL, compiled.mesh.ranks))
        return Inspected(artefact, found.memory, list(_traffic(compiled)), graphs, whole, found.flow)
    summary = summarize(compiled)
    return Inspected(artefact, memory(summary), communication(summary), graphs, whole)


def _traffic(compiled: PipelineProgram) -> Iterator[Traffic]:
    mesh = compiled.mesh.with_micro(compiled.plan.microbatches)
    often = {id(graph) for graph in compiled.micro_graphs}
    for name, graph in graphs_of(compiled).items():
        times = compiled.plan.microbatches if id(graph) in often else 1
        yield from graph_traffic(summarize_graph(graph, mesh, {}), compiled.mesh, name, times)
    yield from _between_stages(compiled)


def _between_stages(compiled: PipelineProgram) -> Iterator[Traffic]:
    """What each rank of the pipeline sends to others, and the sums of loss and norm."""
    for pipe, program in enumerate(rank_instructions(compiled).programs):
        sizes = [t.size for i in program if isinstance(i, Exchange) for t in i.transfers if t.sends]
        if sizes:
            yield Traffic(f"rank {pipe} of pipe", "send", (PIPE,), len(sizes), sum(sizes), sum(sizes))
        sums = sum(isinstance(i, Collective) and i.axes == (PIPE,) for i in program)
        if sums:
            payload, ranks = sums * SCALAR, len(compiled.programs)
            yield Traffic(
                f"rank {pipe} of pipe", "all-reduce", (PIPE,), sums, payload, 2 * payload * (ranks - 1) // ranks
            )


def _ops(graph: Graph | LocalGraph) -> int:
    return sum(node.op == "call_function" for node in graph.module.graph.nodes)
