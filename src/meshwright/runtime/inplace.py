"""Make of ``update`` a program that writes parameters and state in place, as
:mod:`meshwright.compiler.analysis.inplace` says, and releases what comes in.

The inputs are taken from a list that is emptied, so that a gradient lives no longer than its last use.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import fx
from torch.fx.graph import CodeGen

from meshwright.compiler.analysis.inplace import in_place
from meshwright.compiler.analysis.reuse import in_place_target
from meshwright.compiler.graph.program import Value
from meshwright.compiler.graph.rank_program import LocalGraph


@dataclass(frozen=True)
class InPlaceUpdate:
    """``module`` takes one list of the inputs, empties it, and returns the ``outputs``."""

    module: fx.GraphModule
    outputs: tuple[Value, ...]
    """What it returns: the outputs that are not written into an input (norm, results, new values of frozen inputs)."""


class InputsFromList(CodeGen):
    """Generates ``forward(self, inputs)`` that unpacks and empties the list."""

    def gen_fn_def(self, free_vars: list[str], maybe_return_annotation: str, *, expanded_def: bool = False) -> str:
        names = [v.split(":")[0].split("=")[0].strip() for v in free_vars if v != "self"]
        unpack = f"[{', '.join(names)}] = inputs; inputs.clear()" if names else "pass"
        return f"def {self._func_name}(self, inputs){maybe_return_annotation}:\n    {unpack}"


def update_in_place(graph: LocalGraph, frozen: Collection[Value] = ()) -> InPlaceUpdate:
    """The update graph as described above; the given one is left as it is. Nothing is written over ``frozen`` inputs,
    whose new values are among the outputs."""
    way = in_place(graph, frozen)
    made = fx.Graph(owning_module=graph.module)
    copies: dict[fx.Node, fx.Node] = {}
    kept: dict[fx.Node, fx.Node] = {}
    for node in way.order:
        copies[node] = made.node_copy(node, copies.__getitem__)
        if node in way.reused:
            copies[node].target = in_place_target(node) or node.target
        if node in way.kept:
            kept[node] = made.call_function(torch.ops.aten.clone.default, (copies[node],))
        for target, source in way.written_back.get(node, ()):
            made.call_function(torch.ops.aten.copy_.default, (copies[target], kept.get(source, copies[source])))
    made.output(tuple(kept.get(n, copies[n]) for n in way.returned.values()))
    made.set_codegen(InputsFromList())
    return InPlaceUpdate(fx.GraphModule(graph.module, made), tuple(way.returned))
