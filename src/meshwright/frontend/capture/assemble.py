"""Make graphs with roles out of a traced function: unused inputs dropped, constants lifted, prologue split off."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from meshwright.compiler.graph.adapter import lifted_constants
from meshwright.compiler.graph.program import Annotation, Graph, Signature, Value, annotation
from meshwright.frontend.capture.carries import Carries, Lost, State, Unrelated, follow
from meshwright.frontend.capture.tidy import remove_dead


def lift_constants(module: fx.GraphModule, inputs: list[Value], constants: dict[str, Tensor], prefix: str) -> None:
    """Turn real tensors that the graph keeps as attributes into ``constant`` inputs."""
    graph = module.graph
    places = [n for n in graph.nodes if n.op == "placeholder"]
    for name, tensor in lifted_constants(module).items():
        nodes = [n for n in graph.nodes if n.op == "get_attr" and n.target == name]
        if not any(n.users for n in nodes):
            continue
        label = f"{prefix}{name.strip('_')}"
        with graph.inserting_after(places[-1]) if places else graph.inserting_before(None):
            place = graph.placeholder(label)
        value = nodes[0].meta.get("val")
        place.meta["val"] = value if isinstance(value, Tensor) else tensor
        place.meta["meshwright"] = Annotation(tuple(tensor.shape), tensor.dtype)
        for node in nodes:
            node.replace_all_uses_with(place)
        places.append(place)
        inputs.append(Value("constant", label))
        constants[label] = tensor.detach().clone()
    remove_dead(graph)


def finish(module: fx.GraphModule, inputs: Sequence[Value], outputs: Sequence[Value]) -> Graph:
    """The graph with readable placeholder names and without the placeholders that nothing uses."""
    graph = module.graph
    places = [n for n in graph.nodes if n.op == "placeholder"]
    kept: list[Value] = []
    for node, value in zip(places, inputs, strict=True):
        if node.users:
            kept.append(value)
            _rename(node, value)
        else:
            graph.erase_node(node)
    for node in graph.nodes:
        if node.op in ("placeholder", "call_function"):
            annotation(node)
    (output,) = graph.find_nodes(op="output")
    results: Any = output.args[0]
    output.args = (tuple(results),)
    graph.set_codegen(fx.graph.CodeGen())  # a traced graph takes and gives nested lists
    graph.lint()
    made = fx.GraphModule(torch.nn.Module(), graph)
    return Graph(made, Signature(tuple(kept), tuple(outputs)))


def _rename(node: fx.Node, value: Value) -> None:
    name = value.name if value.kind not in ("gradient", "state") else f"{value.kind}_{value.name}"
    label = "".join(c if c.isalnum() else "_" for c in name) or value.kind
    node.name = node.graph._graph_namespace.create_name(label, None)
    node.target = node.name


def split_prologue(
    module: fx.GraphModule, inputs: list[Value], batch_dims: dict[str, int | None], batch_size: int
) -> Graph:
    """Move values that depend on the batch alone and have lost the batch dim into a graph of their own.

    ``module`` (whose placeholders ``inputs`` describes) then takes them as ``prologue`` inputs.
    """
    graph = module.graph
    places = [n for n in graph.nodes if n.op == "placeholder"]
    roles = dict(zip(places, inputs, strict=True))
    states: dict[fx.Node, State] = {}
    for node in graph.nodes:
        if node.op == "placeholder" and roles[node].kind == "batch":
            dim = batch_dims[roles[node].name]
            states[node] = Unrelated() if dim is None else Carries(dim)
        elif node.op == "placeholder" and roles[node].kind == "constant":
            states[node] = Unrelated()
        elif node.op == "call_function" and all(n in states for n in node.all_input_nodes):
            states[node] = follow(node, states, batch_size)
    moved = [n for n, s in states.items() if _moves(n, s) and _leaves(n, states)]
    prologue = _extract(graph, moved, roles)
    last = places[-1]
    for node in moved:
        with graph.inserting_after(last):
            place = graph.placeholder(node.name)
        place.meta = {"val": node.meta["val"], "meshwright": annotation(node)}
        node.replace_all_uses_with(place)
        inputs.append(Value("prologue", node.name))
        last = place
    remove_dead(graph)
    return prologue


def _leaves(node: fx.Node, states: dict[fx.Node, State]) -> bool:
    """Whether something other than a value that moves as well uses the node."""
    return any(user not in states or not _moves(user, states[user]) for user in node.users)


def _moves(node: fx.Node, state: State) -> bool:
    """Gradients stay, for they are scaled by the loss's own gradient, also where that is a constant."""
    return isinstance(state, Lost) and annotation(node).phase != "backward"


def _extract(graph: fx.Graph, wanted: list[fx.Node], roles: dict[fx.Node, Value]) -> Graph:
    """A graph that computes the wanted nodes from the placeholders."""
    needed: set[fx.Node] = set()
    pending = list(wanted)
    while pending:
        node = pending.pop()
        if node not in needed:
            needed.add(node)
            pending.extend(node.all_input_nodes)
    made = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    kept: list[Value] = []
    for node in graph.nodes:
        if node not in needed:
            continue
        copies[node] = made.node_copy(node, lambda n: copies[n])
        note = annotation(node)
        copies[node].meta = {
            "val": node.meta["val"],
            "meshwright": Annotation(note.shape, note.dtype, None, note.origin, note.block, "prologue"),
        }
        if node.op == "placeholder":
            kept.append(roles[node])
    made.output(tuple(copies[n] for n in wanted))
    outputs = [Value("prologue", n.name) for n in wanted]
    return finish(fx.GraphModule(torch.nn.Module(), made), kept, outputs)
