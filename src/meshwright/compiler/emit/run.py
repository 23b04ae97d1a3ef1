"""Make a graph run the Python file that was generated from it, on a given device."""

from __future__ import annotations

import linecache
from typing import Any

import torch
from torch import Tensor, fx

from meshwright.compiler.graph.rank_program import LocalGraph


def on_device(graph: LocalGraph, device: torch.device) -> None:
    """Let every op that makes a tensor make it on ``device``."""

    def move(value: Any) -> Any:
        return device if isinstance(value, torch.device) else value

    for node in graph.module.graph.nodes:
        if node.op == "call_function":
            node.args = tuple(map(move, node.args))
            node.kwargs = {key: move(value) for key, value in node.kwargs.items()}
    graph.module.recompile()


def run_file(graph: LocalGraph, name: str, source: str, file: str, device: torch.device) -> None:
    """Let the module call the function ``name`` of ``source``; tracebacks and profiles show ``file``."""
    space: dict[str, Any] = {"__name__": f"rank.{name}", "__file__": file}
    exec(compile(source, file, "exec"), space)
    linecache.checkcache(file)
    if "DEVICE" in space:
        space["DEVICE"] = device
    function = space[name]

    def forward(self: fx.GraphModule, *args: Tensor) -> Any:
        return function(*args)

    # fx makes a class for each GraphModule, so this changes this graph alone
    type(graph.module).forward = forward
