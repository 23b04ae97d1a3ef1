"""A rank program with every floating dtype replaced by float64, to be compared with the widened step for one device."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import torch
from torch import fx

from meshwright.compiler.graph.fake import fake_tensor
from meshwright.compiler.graph.pipeline_program import Compiled, PipelineProgram, Stage
from meshwright.compiler.graph.program import Annotation, annotation
from meshwright.compiler.graph.rank_program import LocalGraph
from meshwright.compiler.graph.widen import widen


def widen_compiled(rank_program: Compiled) -> Compiled:
    """The same communication and the same ops on the same shards, in float64 throughout."""
    if isinstance(rank_program, PipelineProgram):
        return dataclasses.replace(
            rank_program,
            program=widen(rank_program.program),
            prologue=_graph(rank_program.prologue),
            stages=tuple(_stage(stage) for stage in rank_program.stages),
        )
    return dataclasses.replace(
        rank_program,
        program=widen(rank_program.program),
        prologue=_graph(rank_program.prologue),
        micro=_graph(rank_program.micro),
        update=_graph(rank_program.update),
    )


def _stage(stage: Stage) -> Stage:
    passes = {kind: _graph(graph) for kind, graph in stage.passes.items()}
    return dataclasses.replace(stage, passes=passes, update=tuple(_graph(graph) for graph in stage.update))


def _graph(graph: LocalGraph) -> LocalGraph:
    made = fx.GraphModule(torch.nn.Module(), copy.deepcopy(graph.module.graph))
    for old, node in zip(graph.module.graph.nodes, made.graph.nodes, strict=True):
        note = annotation(old)
        wide: Annotation = dataclasses.replace(note, dtype=_wide(note.dtype))
        node.meta = {**old.meta, "meshwright": wide}
        if node.op == "placeholder" and wide.dtype is not None:
            node.meta["val"] = fake_tensor(wide.shape, wide.dtype)
        elif node.op == "call_function":
            node.args = fx.node.map_aggregate(node.args, _wide)
            node.kwargs = fx.node.map_aggregate(node.kwargs, _wide)
    made.recompile()
    return LocalGraph(made, graph.signature, graph.inputs, graph.outputs)


def _wide(value: Any) -> Any:
    return torch.float64 if isinstance(value, torch.dtype) and value.is_floating_point else value
