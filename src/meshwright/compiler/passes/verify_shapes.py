"""Run a lowered graph on fake tensors: every value must have the local shape that its sharding says."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor, fx

from meshwright.compiler.diagnostics import InternalError
from meshwright.compiler.graph import collectives
from meshwright.compiler.graph.fake import fake_mode
from meshwright.compiler.graph.pending import Pending
from meshwright.compiler.graph.pipeline_program import Compiled
from meshwright.compiler.graph.program import annotation
from meshwright.compiler.graph.rank_program import LocalGraph
from meshwright.compiler.graph.shapes import Shapes
from meshwright.compiler.graph.trial import attempt, tensor
from meshwright.compiler.mesh import Mesh


def verify_shapes(local: LocalGraph, mesh: Mesh, meta: bool = False) -> LocalGraph:
    """Check every shape that is not known yet, and record it in ``node.meta["val"]``.

    ``meta``: with meta tensors in place of fake ones, which is faster and leaves devices unchecked.
    Raises InternalError that names the node.
    """
    values: dict[fx.Node, Any] = {}
    mode = contextlib.nullcontext() if meta else fake_mode()
    with mode, collectives.use(Shapes(mesh)), torch.no_grad():
        for node in local.module.graph.nodes:
            if node.op == "placeholder":
                note = annotation(node)
                values[node] = tensor(note.shape, note.dtype or torch.float32, meta)
                _record(node, values[node])
            elif node.op == "call_function":
                known = "val" in node.meta
                values[node] = node.meta["val"] if known else _result(node, values, mesh, meta)
                if not known:
                    _record(node, values[node])
    return local


def lay_out(rank_program: Compiled) -> None:
    """Find out how all values of a program lie in memory: a program that was read from its text knows shapes alone."""
    mesh = rank_program.mesh.with_micro(rank_program.plan.microbatches)
    for local in rank_program.graphs:
        for node in local.module.graph.nodes:
            if node.op == "call_function":
                node.meta.pop("val", None)
        verify_shapes(local, mesh)


def _record(node: fx.Node, result: Any) -> None:
    note = annotation(node)
    if isinstance(result, Tensor) and note.sharding is not None:
        if tuple(result.shape) != note.shape:
            raise InternalError(
                f"verify_shapes: {node.format_node()} gives {tuple(result.shape)}; {note.sharding} wants {note.shape}"
            )
        note.dtype = result.dtype
    if isinstance(result, Pending):
        return  # the node that waits for it says what it brings
    if node.target is collectives.wait:
        node.all_input_nodes[0].meta["val"] = tuple(result)
    node.meta["val"] = result


def _result(node: fx.Node, values: dict[fx.Node, Any], mesh: Mesh, meta: bool) -> Any:
    def given(value: Any) -> Any:
        if isinstance(value, fx.Node):
            return values[value]
        if isinstance(value, (list, tuple)):
            return type(value)([given(v) for v in value])
        return value

    args = tuple([given(a) for a in node.args])
    kwargs = {k: given(v) for k, v in node.kwargs.items()}
    try:
        return attempt(node.target, args, kwargs, mesh, meta)
    except Exception as fault:
        raise InternalError(f"verify_shapes: {node.format_node()} cannot run on its shards: {fault}") from fault
