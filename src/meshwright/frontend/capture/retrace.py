"""Somebody else's FX module of ATen ops, traced again so that it holds only ops that have rules."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from meshwright.compiler.diagnostics import error
from meshwright.compiler.graph.adapter import trace, traced_graph
from meshwright.compiler.graph.fake import fake_tensor
from meshwright.compiler.graph.program import Graph, Signature, Value
from meshwright.frontend.capture.assemble import lift_constants
from meshwright.frontend.capture.contractions import rewrite_contractions
from meshwright.frontend.capture.joint import Interpreter, Marker, describe
from meshwright.frontend.capture.origins import Blocks, node_origin
from meshwright.frontend.capture.tidy import tidy
from meshwright.frontend.capture.writes import without_writes


@dataclass(frozen=True)
class Retraced:
    """The module as a graph: ``batch`` inputs by placeholder name, ``constant`` inputs for the tensors that it keeps
    as attributes, ``result`` outputs by number."""

    graph: Graph
    constants: dict[str, Tensor]
    names: tuple[str, ...]
    """The name of the node behind each output; ``""`` where it is one of several results of a node."""
    structure: pytree.TreeSpec
    """How the outputs are nested."""


def retrace(module: fx.GraphModule, example_inputs: Sequence[Any] | None = None) -> Retraced:
    """Trace an FX module at the shapes of ``meta["val"]`` of its placeholders, or of ``example_inputs``.

    Raises E0331 for a placeholder without a shape, E0332 for a node that calls no op, E0251 for an op that draws
    random numbers, and E0257 for one that cannot be traced.
    """
    _check_nodes(module)
    given = _inputs(module, example_inputs)  # by the names of the original: a copied graph renames builtins like input
    module = fx.GraphModule(module, copy.deepcopy(module.graph))
    without_writes(module.graph)
    names = [name for name, value in given.items() if isinstance(value, Tensor)]
    fakes = [fake_tensor(given[n].shape, given[n].dtype) for n in names]
    marker = Marker(Blocks(module))
    kept: dict[str, Any] = {}

    def function(*tensors: Tensor) -> list[Any]:
        marker.last = traced_graph()._root.prev
        *found, key = tensors
        values = {**given, **dict(zip(names, found, strict=True))}
        interpreter = Interpreter("", marker, key, {}, {})
        flat = interpreter.run(module, list(values.values()), grad=False)
        leaves, kept["structure"] = pytree.tree_flatten(_nested(module, flat))
        marker.switch(None)
        return leaves

    made = trace(function, *fakes, fake_tensor((2,), torch.int64))
    describe(made.graph, marker, "")
    places = made.graph.find_nodes(op="placeholder")
    _drop_key(module, places.pop())
    for name, place in zip(names, places, strict=True):
        place.name = place.target = made.graph._graph_namespace.create_name(name, None)
    inputs = [Value("batch", n) for n in names]
    constants: dict[str, Tensor] = {}
    lift_constants(made, inputs, constants, "constant_")
    rewrite_contractions(made)
    tidy(made)
    (output,) = made.graph.find_nodes(op="output")
    results: Any = output.args[0]
    output.args = (tuple(results),)
    made.graph.set_codegen(fx.graph.CodeGen())  # a traced graph takes and gives nested lists
    graph = fx.GraphModule(torch.nn.Module(), made.graph)
    signature = Signature(tuple(inputs), tuple(Value("result", str(i)) for i in range(len(results))))
    return Retraced(Graph(graph, signature), constants, _names(module, len(results)), kept["structure"])


def _check_nodes(module: fx.GraphModule) -> None:
    for node in module.graph.nodes:
        if node.op in ("call_module", "call_method"):
            raise error(
                "E0332",
                f"'{node.name}' calls the {node.op.removeprefix('call_')} '{node.target}', which is no ATen op",
                node_origin(node, ""),
                "give a graph of ATen ops: torch.export.export(module, args).graph_module, or make_fx",
            )


def _inputs(module: fx.GraphModule, example_inputs: Sequence[Any] | None) -> dict[str, Any]:
    places = module.graph.find_nodes(op="placeholder")
    if example_inputs is not None and len(example_inputs) != len(places):
        raise error(
            "E0331",
            f"there are {len(example_inputs)} example inputs for {len(places)} placeholders",
            action=f"give one for each of {', '.join(p.name for p in places)}",
        )
    found = {}
    for number, place in enumerate(places):
        value = place.meta.get("val") if example_inputs is None else example_inputs[number]
        if "val" not in place.meta and example_inputs is None:
            raise error(
                "E0331",
                f"nothing says which shape the placeholder '{place.name}' has",
                action="give example_inputs=(...), or a graph whose placeholders have meta['val']",
            )
        sizes = value.shape if isinstance(value, Tensor) else (value,)
        if any(isinstance(n, (torch.SymInt, torch.SymFloat, torch.SymBool)) for n in sizes):
            raise error(
                "E0331",
                f"the placeholder '{place.name}' has a size that is not fixed",
                action="export the module without dynamic shapes",
            )
        found[place.name] = value
    return found


def _nested(module: fx.GraphModule, flat: list[Any]) -> Any:
    """What the module returns, from the list in which the interpreter gives it."""
    (output,) = module.graph.find_nodes(op="output")
    whole = output.args[0]
    if isinstance(whole, tuple):
        return tuple(flat)
    return flat if isinstance(whole, list) else flat[0]


def _drop_key(module: fx.GraphModule, key: fx.Node) -> None:
    if key.users:
        drawing = next(n for n in module.graph.nodes if "dropout" in str(n.target) or "attention" in str(n.target))
        raise error(
            "E0251",
            f"'{drawing.name}' draws random numbers, which no other mesh could repeat",
            node_origin(drawing, ""),
            "export the module in eval mode, or call torch.ops.meshwright.dropout with a key that is an input",
        )
    key.graph.erase_node(key)


def _names(module: fx.GraphModule, count: int) -> tuple[str, ...]:
    (output,) = module.graph.find_nodes(op="output")
    leaves = pytree.tree_leaves(output.args[0])
    if len(leaves) != count:
        return ("",) * count
    return tuple(n.name if isinstance(n, fx.Node) else "" for n in leaves)
