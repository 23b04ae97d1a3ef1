"""The textual form of an annotated graph: stable, one op a line, readable back (see text_parser.py).

    graph micro
      %w: f32[8, 4] = input parameter "w"
      %x: f32[2, 4] = input batch "x"
      %einsum: f32[2, 8] = meshwright.einsum.default("bi,oi->bo", %x, %w)  # model.layers.0
      %sum_1: f32[] = aten.sum.default(%einsum)  # backward model.layers.0
      output loss "loss" = %sum_1

A type is the dtype and the shape. In a ``sharded`` graph the shape is written as a sharding,
``f32[8@data, 4] +tensor``; where the node's own shape differs from the whole one (the graph of a
rank) both are given, ``f32[4, 4] of [8@data, 4]``. A node without a sharding is then ``of ?``.
The comment holds phase and block, and on request the origin; the phase of ops of backward that do again what forward
has done is written ``recompute``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from meshwright.compiler.diagnostics import InternalError, Origin
from meshwright.compiler.graph.dtypes import short_name
from meshwright.compiler.graph.functions import function_name
from meshwright.compiler.graph.program import Annotation, Graph, Value, annotation
from meshwright.compiler.graph.rank_program import LocalGraph
from meshwright.compiler.mesh import Sharding

PHASES = ("forward", "backward", "update", "prologue")
RECOMPUTE = "recompute"
"""What stands for the phase of ops of backward that do again what forward has done."""


def print_graph(graph: Graph | LocalGraph, name: str, origins: bool = False) -> str:
    """The textual form of a graph. With ``origins`` each line ends with the user's file and line."""
    nodes = list(graph.module.graph.nodes)
    local = isinstance(graph, LocalGraph)
    sharded = local or any(annotation(n).sharding is not None for n in nodes)
    roles = dict(zip((n for n in nodes if n.op == "placeholder"), graph.signature.inputs, strict=True))
    lines = [("local " if local else "sharded " if sharded else "") + f"graph {name}"]
    for node in nodes:
        if node.op == "output":
            lines += _outputs(graph, node)
            continue
        if node.op == "placeholder":
            call = f"input {_role(roles[node])}"
        elif node.op == "call_function":
            call = f"{function_name(node.target)}({_arguments(node)})"
        else:
            raise InternalError(f"node {node.name} is a {node.op}, which has no textual form")
        kind = value_type(node, sharded)
        lines.append(f"  %{node.name}{kind and ': '}{kind} = {call}{_comment(annotation(node), origins)}")
    return "\n".join(lines) + "\n"


def _outputs(graph: Graph | LocalGraph, node: fx.Node) -> list[str]:
    values = node.args[0]
    if not isinstance(values, (tuple, list)):
        raise InternalError("a graph's output is a tuple")
    lines = []
    for role, value in zip(graph.signature.outputs, values, strict=True):
        sharding = f": {graph.outputs[role]}" if isinstance(graph, LocalGraph) and role in graph.outputs else ""
        lines.append(f"  output {_role(role)}{sharding} = {literal(value)}")
    return lines


def _role(value: Value) -> str:
    return f"{value.kind} {quoted(value.name)}"


def type_text(note: Annotation, sharded: bool) -> str:
    """The type of one tensor: ``f32[8@data, 4]``, ``f32[4, 4] of [8@data, 4]``, ``f32[4, 4]``."""
    assert note.dtype is not None
    if sharded and note.sharding is not None:
        if note.sharding.shape == tuple(note.shape):
            return f"{short_name(note.dtype)}{note.sharding}"
        return f"{short_name(note.dtype)}{Sharding.whole(note.shape)} of {note.sharding}"
    return f"{short_name(note.dtype)}{Sharding.whole(note.shape)}" + (" of ?" if sharded else "")


def value_type(node: fx.Node, sharded: bool) -> str:
    """The type of what a node yields, "" if that is no tensor."""
    note, value = annotation(node), node.meta.get("val")
    if isinstance(value, (tuple, list)):
        return "(" + ", ".join(_element(item) for item in value) + ")"
    if value is not None and not isinstance(value, torch.Tensor):
        return ""
    if note.dtype is not None and (note.sharding is not None or value is None):
        return type_text(note, sharded)
    return _element(value) + (" of ?" if sharded else "") if isinstance(value, torch.Tensor) else ""


def _element(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return f"{short_name(value.dtype)}{Sharding.whole(value.shape)}"
    return "None"


def _comment(note: Annotation, origins: bool) -> str:
    words: list[str] = []
    if note.phase != "forward" or note.block in (*PHASES, RECOMPUTE):
        words.append(RECOMPUTE if note.recomputed else note.phase)
    if note.block:
        words.append(note.block)
    if origins and note.origin != Origin():
        words.append(f"@ {note.origin.file}:{note.origin.line}")
        words += [f"({note.origin.module})"] if note.origin.module else []
        words += [f"| {' '.join(note.origin.text.split())}"] if note.origin.text else []
    return "  # " + " ".join(words) if words else ""


def _arguments(node: fx.Node) -> str:
    parts = [literal(a) for a in node.args] + [f"{key}={literal(value)}" for key, value in node.kwargs.items()]
    return ", ".join(parts)


def quoted(text: str) -> str:
    """A string in double quotes, on one line."""
    escaped = repr("'" + text)[2:-1]  # the quote in front makes repr choose double quotes where it can
    if repr("'" + text)[0] == "'":
        escaped = repr("'" + text)[3:-1].replace("\\'", "'").replace('"', '\\"')
    return f'"{escaped}"'


def node_text(value: Any) -> str | None:
    """``%name`` for a node, None for anything else."""
    return f"%{value.name}" if isinstance(value, fx.Node) else None


def literal(value: Any, special: Callable[[Any], str | None] = node_text) -> str:
    """An argument as text: a Python literal, with dtypes by their short names.

    ``special`` says first how to write a value, or None; nodes must be known to it.
    """
    written = special(value)
    if written is not None:
        return written
    if isinstance(value, str):
        return quoted(value)
    if value is None or isinstance(value, (bool, int, float)):
        return repr(value)  # inf, -inf and nan included
    if isinstance(value, complex):
        return f"complex({value.real!r}, {value.imag!r})"
    if isinstance(value, torch.dtype):
        return short_name(value)
    if isinstance(value, torch.device):
        return f"device({quoted(str(value))})"
    if isinstance(value, (torch.layout, torch.memory_format)):
        return str(value)
    if isinstance(value, slice):
        return "slice(" + ", ".join(literal(v, special) for v in (value.start, value.stop, value.step)) + ")"
    if isinstance(value, list):
        return "[" + ", ".join(literal(v, special) for v in value) + "]"
    if isinstance(value, tuple):
        return "(" + ", ".join(literal(v, special) for v in value) + ("," if len(value) == 1 else "") + ")"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{literal(k, special)}: {literal(v, special)}" for k, v in value.items()) + "}"
    raise InternalError(f"{value!r} of {type(value).__name__} has no textual form")
