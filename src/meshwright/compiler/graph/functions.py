"""The names of what a graph may call: torch ops, Meshwright's collectives, Python's operators.

The textual form and the generated Python use these names, so a graph can be printed and read back.
"""

from __future__ import annotations

import importlib
import inspect
import operator
from collections.abc import Callable
from typing import Any

import torch

from meshwright.compiler.diagnostics import InternalError
from meshwright.compiler.graph import collectives
from meshwright.compiler.graph.redistribute import redistribute

COLLECTIVES: dict[str, Callable[..., Any]] = {
    name: function
    for name, function in inspect.getmembers(collectives, inspect.isfunction)
    if function.__module__ == collectives.__name__ and not name.startswith("_") and name not in ("use", "current")
}
"""The functions of :mod:`collectives` that a rank program calls, by name."""


def function_name(target: Any) -> str:
    """``aten.mul.Tensor``, ``meshwright.einsum.default``, ``all_gather``, ``operator.getitem``.

    Raises InternalError for what has no such name.
    """
    if isinstance(target, torch._ops.OpOverload):
        return str(target)
    if target is redistribute:
        return "redistribute"
    name = getattr(target, "__name__", "")
    if COLLECTIVES.get(name) is target:
        return str(name)
    if getattr(operator, name, None) is target:
        return f"operator.{name}"
    raise InternalError(f"a graph calls {target!r}, which has no textual form")


def function_named(name: str) -> Callable[..., Any]:
    """The function of a printed name. Raises KeyError if there is none."""
    if name == "redistribute":
        return redistribute
    if name in COLLECTIVES:
        return COLLECTIVES[name]
    parts = name.split(".")
    if parts[0] == "operator" and len(parts) == 2:
        found = getattr(operator, parts[1], None)
    elif len(parts) == 3:
        if parts[0] == "meshwright":
            importlib.import_module("meshwright.compiler.graph.ops")  # registers the ops
        packet = getattr(getattr(torch.ops, parts[0]), parts[1], None)
        found = getattr(packet, parts[2], None)
    else:
        found = None
    if found is None:
        raise KeyError(name)
    function: Callable[..., Any] = found
    return function
