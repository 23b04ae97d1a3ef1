"""The graph of a rank as readable Python: one op a line, types as comments, dead values deleted.

The file imports torch and Meshwright's collectives, nothing else; it is run as it stands.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from meshwright.compiler.diagnostics import InternalError
from meshwright.compiler.graph.functions import function_name
from meshwright.compiler.graph.meeting import meets
from meshwright.compiler.graph.program import Value, annotation
from meshwright.compiler.graph.rank_program import LocalGraph
from meshwright.compiler.graph.text import RECOMPUTE, literal, quoted, value_type

WIDTH = 120
_RESERVED = {"torch", "operator", "collectives", "Tensor", "DEVICE", "ops"}
_PURPOSE = {
    "prologue": "what depends on the batch alone, once a step",
    "micro": "one microbatch, from parameters and batch to the loss and the gradients",
    "update": "from the gradients to new parameters and optimizer state",
    "forward": "a stage's forward pass of one microbatch",
    "backward_input": "a stage's backward pass of one microbatch, as far as the stage before waits for it",
    "backward_weight": "the rest of a stage's backward pass of one microbatch: the gradients of its weights",
}


def emit_python(graph: LocalGraph, name: str, title: str = "") -> str:
    """The source of a file that defines the function ``name``. ``title`` says what it was compiled from."""
    nodes = list(graph.module.graph.nodes)
    calls = [n for n in nodes if n.op == "call_function"]
    spaces = sorted({n.target.namespace for n in calls if isinstance(n.target, torch._ops.OpOverload)})
    names = _variables(nodes, _RESERVED.union(spaces))
    (output,) = (n for n in nodes if n.op == "output")
    lines = [f'"""{name}: {_purpose(name)}, as every rank runs it.', ""]
    lines += [f"Compiled by Meshwright from {title}." if title else "Compiled by Meshwright."]
    lines += [
        "A comment gives the shape on this rank and, after `of`, the whole tensor with the axes that cut it.",
        '"""',
        "",
    ]
    lines += _imports(calls, spaces)
    lines += ["", "", f"def {name}("]
    roles = dict(zip((n for n in nodes if n.op == "placeholder"), graph.signature.inputs, strict=True))
    lines += [f"    {names[n]}: Tensor,  # {_role(role)}: {value_type(n, sharded=True)}" for n, role in roles.items()]
    lines += [") -> tuple[Tensor | None, ...]:"]
    lines += _body(calls, names, _last_uses(nodes))
    lines += ["    return (", *_results(graph, output, names), "    )"]
    return "\n".join(lines) + "\n"


def _purpose(name: str) -> str:
    if name.startswith("update_"):
        return f"round {name.removeprefix('update_')} of a stage's update, after which stages hand values over"
    first, _, number = name.rpartition("_")
    if number.isdecimal() and first in _PURPOSE:
        return f"{_PURPOSE[first]}; what comes after meeting {number} of the microbatches"
    return _PURPOSE.get(name, "a graph")


def _variables(nodes: list[fx.Node], reserved: set[str]) -> dict[fx.Node, str]:
    """A variable for each node: its name, changed where that means something else in the file."""
    taken = reserved | {n.name for n in nodes}
    names = {}
    for node in nodes:
        name = node.name
        if name in reserved:
            while name in taken:
                name += "_"
            taken.add(name)
        names[node] = name
    return names


def _imports(calls: list[fx.Node], spaces: list[str]) -> list[str]:
    called = {function_name(n.target) for n in calls}
    lines = (
        ["import operator", ""] if any(c.startswith("operator.") and c != "operator.getitem" for c in called) else []
    )
    lines += ["import torch", "from torch import Tensor", ""]
    own = "meshwright" in spaces
    lines += ["from meshwright.compiler.graph import collectives"] if any("." not in c for c in called) else []
    lines += (
        ["from meshwright.compiler.graph import ops as _register_ops  # noqa: F401 (importing it registers the ops)"]
        if own
        else []
    )
    lines += [""] if lines[-1] else []
    lines += [f"{_space(s)} = torch.ops.{s}" for s in spaces]
    devices: list[torch.device] = []
    for call in calls:
        devices += [v for v in (*call.args, *call.kwargs.values()) if isinstance(v, torch.device)]
    lines += [f'DEVICE = torch.device("{devices[0]}")  # set anew by a worker that runs on another'] if devices else []
    return lines


def _space(name: str) -> str:
    return "ops" if name == "meshwright" else name


def _last_uses(nodes: list[fx.Node]) -> dict[fx.Node, list[fx.Node]]:
    """By node: the values that nothing reads after it (itself, if nothing reads it at all)."""
    seen: set[fx.Node] = set()
    dead: dict[fx.Node, list[fx.Node]] = {}
    for node in reversed(nodes):
        read = [n for n in dict.fromkeys([*node.all_input_nodes, node]) if n not in seen]
        seen.update(read)
        dead[node] = [n for n in read if not (n is node and node.op != "call_function")]
    return dead


def _body(calls: list[fx.Node], names: dict[fx.Node, str], dead: dict[fx.Node, list[fx.Node]]) -> list[str]:
    lines: list[str] = []
    section = None
    for node in calls:
        note = annotation(node)
        phase = RECOMPUTE if note.recomputed else note.phase
        if (note.block, phase) != section and (note.block or not lines):
            section = (note.block, phase)
            lines += [""] if lines else []
            lines += [f"    # {phase}" + (f" of {note.block}" if note.block else "")]
        if meets(node):
            lines.append("    # microbatches meet here: this one waits until the last has come")
        lines += _statement(node, names)
        if dead[node]:
            lines.append("    del " + ", ".join(names[n] for n in dead[node]))
    return lines


def _statement(node: fx.Node, names: dict[fx.Node, str]) -> list[str]:
    """``variable = call(...)  # type``, on several lines if it is long."""
    function, args = _call(node, names)
    comment = value_type(node, sharded=True).removesuffix(" of ?")
    line = (
        f"    {names[node]} = {function}({', '.join(args)})" if args is not None else f"    {names[node]} = {function}"
    )
    if len(line) > WIDTH and args:
        head = f"    {names[node]} = {function}("
        return [f"    # {comment}", head, *(f"        {a}," for a in args), "    )"]
    if len(line) + len(comment) + 4 > WIDTH:
        return [f"    # {comment}", line]
    return [f"{line}  # {comment}" if comment else line]


def _call(node: fx.Node, names: dict[fx.Node, str]) -> tuple[str, list[str] | None]:
    """The function and its arguments as Python; without arguments an expression."""
    write = _writer(names)
    name = function_name(node.target)
    args = [write(a) for a in node.args]
    if name == "operator.getitem":
        return f"{args[0]}[{args[1]}]", None
    args += [f"{key}={write(value)}" for key, value in node.kwargs.items()]
    space, _, rest = name.partition(".")
    return (f"{_space(space)}.{rest}" if rest else f"collectives.{name}"), args


def _writer(names: dict[fx.Node, str]) -> Callable[[Any], str]:
    """Writes an argument as Python."""

    def special(value: Any) -> str | None:
        if isinstance(value, fx.Node):
            return names[value]
        if isinstance(value, torch.dtype):
            return str(value)
        if isinstance(value, torch.device):
            return "DEVICE"
        if isinstance(value, float) and not math.isfinite(value):
            return f'float("{value}")'
        return None

    return lambda value: literal(value, special)


def _results(graph: LocalGraph, output: fx.Node, names: dict[fx.Node, str]) -> list[str]:
    values = output.args[0]
    if not isinstance(values, (tuple, list)):
        raise InternalError("a graph's output is a tuple")
    lines = []
    for role, value in zip(graph.signature.outputs, values, strict=True):
        lies = f": {graph.outputs[role]}" if role in graph.outputs else ""
        lines.append(f"        {_writer(names)(value)},  # {_role(role)}{lies}")
    return lines


def _role(value: Value) -> str:
    return f"{value.kind} {quoted(value.name)}"
