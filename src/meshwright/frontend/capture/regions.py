"""Regions without gradient, marked so that they survive the functionalization of an exported graph.

``torch.export`` keeps ``torch.no_grad()`` as a region of its own. Decomposing a graph that writes into tensors
dissolves these regions, and their content would be differentiated. So every value that a region reads is
first made a constant, by an op that later becomes ``detach``.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind

from meshwright.compiler.diagnostics import error
from meshwright.compiler.graph.adapter import HigherOrderOperator, is_mutable
from meshwright.frontend.capture.origins import node_origin


def mark_constants(program: ExportedProgram, prefix: str) -> None:
    """Mark the regions of a program, in place.

    Raises E0255 for a region that writes into a tensor which has a gradient: what eager PyTorch makes of that
    is not the gradient of any function.
    """
    buffers = {
        s.arg.name
        for s in program.graph_signature.input_specs
        if s.kind in (InputKind.BUFFER, InputKind.CONSTANT_TENSOR) and hasattr(s.arg, "name")
    }
    free = {n for n in program.graph.nodes if n.op == "placeholder" and n.name in buffers}
    _mark(program.graph_module, free, prefix)


def _mark(module: fx.GraphModule, free: set[fx.Node], prefix: str) -> None:
    """``free`` are the inputs that have no gradient; values made of them alone have none either."""
    for node in module.graph.nodes:
        inputs = node.all_input_nodes
        region = _region(node, module)
        if region is not None:
            enabled, body, given = region
            inner = [n for n in body.graph.nodes if n.op == "placeholder"]
            without = {p for p, g in zip(inner, given, strict=True) if not isinstance(g, fx.Node) or g in free}
            if enabled:
                _mark(body, without, prefix)
            else:
                _mark_region(body, without, prefix)
                free.add(node)
        elif inputs and all(n in free for n in inputs):
            free.add(node)


def _region(node: fx.Node, module: fx.GraphModule) -> tuple[bool, fx.GraphModule, list[Any]] | None:
    if not isinstance(node.target, HigherOrderOperator) or "set_grad_enabled" not in str(node.target):
        return None
    enabled, body, *given = node.args
    assert isinstance(body, fx.Node)
    found = operator.attrgetter(str(body.target))(module)
    assert isinstance(found, fx.GraphModule)
    return bool(enabled), found, given


def _mark_region(body: fx.GraphModule, free: set[fx.Node], prefix: str) -> None:
    placeholders = {n for n in body.graph.nodes if n.op == "placeholder"}
    for node in list(body.graph.nodes):
        if node.op != "call_function":
            continue
        written = _written(node)
        if written is not None and _source(written) in placeholders - free:
            raise error(
                "E0255",
                f"'{node.target}' writes, without gradient, into a tensor that has one",
                node_origin(node, prefix),
                "write into a detached copy, or compute a new tensor",
            )
        for source in [n for n in node.all_input_nodes if n in placeholders - free and n is not written]:
            with body.graph.inserting_before(node):
                constant = body.graph.call_function(torch.ops.meshwright.constant.default, (source,))
            constant.meta = dict(source.meta)
            node.replace_input_with(source, constant)
    body.recompile()


def _written(node: fx.Node) -> fx.Node | None:
    first = node.args[0] if node.args else None
    return first if is_mutable(node.target) and isinstance(first, fx.Node) else None


def _source(node: fx.Node) -> fx.Node:
    """The value in whose memory a view lies."""
    while node.op == "call_function" and node.args and isinstance(node.args[0], fx.Node):
        returns = getattr(getattr(node.target, "_schema", None), "returns", ())
        if not any(r.alias_info is not None for r in returns):
            break
        node = node.args[0]
    return node
