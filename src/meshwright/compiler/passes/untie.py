"""Give every stage its own copy of a weight that several stages read: of a tied embedding, say.

The copies stay one parameter: their gradients come out one by one, ``update`` adds them before anything else is done
with them, and the first stage that gives one keeps the optimizer's state and computes the new value, which it then
hands to the other copies.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import fx

from meshwright.compiler.diagnostics import InternalError, error
from meshwright.compiler.graph.adapter import graph_module
from meshwright.compiler.graph.program import Graph, Parameter, Signature, StepProgram, Value, annotation
from meshwright.compiler.passes.stages import assign

SEPARATOR = "@"


def copy_name(parameter: str, stage: int) -> str:
    """The name of a further copy of a parameter."""
    return f"{parameter}{SEPARATOR}{stage}"


def original(name: str) -> str:
    """The parameter of which a name is a copy, or the name."""
    return name.partition(SEPARATOR)[0]


def untie(program: StepProgram, first_blocks: Sequence[str]) -> StepProgram:
    """The same step, in which no parameter is read by more than one stage.

    Raises MeshwrightError E0502 for a parameter whose gradient is made by stages that do not read it.
    """
    micro = program.micro
    roles = {node: value for value, node in micro.placeholders().items()}
    read = assign(micro.module.graph, roles, first_blocks).weights
    shared = {name: stages for name, stages in read.items() if len(stages) > 1}
    if not shared:
        return program
    micro, uses = _micro(micro, shared, first_blocks)
    update = _update(program.update, uses)
    parameters: list[Parameter] = []
    for parameter in program.parameters:
        parameters.append(parameter)
        for stage in uses[parameter.name].copies if parameter.name in uses else ():
            parameters.append(replace(parameter, name=copy_name(parameter.name, stage), aliases=(parameter.name,)))
    return replace(program, micro=micro, update=update, parameters=tuple(parameters))


@dataclass(frozen=True)
class _Uses:
    """The stages that read a parameter: first that which keeps it, and which of the others have gradients."""

    owner: int
    copies: tuple[int, ...]
    gradients: tuple[int, ...]


def _micro(
    old: Graph, shared: Mapping[str, tuple[int, ...]], first_blocks: Sequence[str]
) -> tuple[Graph, dict[str, _Uses]]:
    graph, copies = _copied(old)
    roles = {copies[node]: value for value, node in old.placeholders().items()}
    place = assign(graph, roles, first_blocks).of
    inputs, outputs = list(old.signature.inputs), list(old.signature.outputs)
    output = next(n for n in graph.nodes if n.op == "output")
    returned = list(output.args[0])
    found: dict[str, _Uses] = {}
    for name, stages in shared.items():
        gradient = Value("gradient", name)
        parts = _parts(graph, returned[outputs.index(gradient)], place, name) if gradient in outputs else {}
        if not parts.keys() <= set(stages):
            read, made = (", ".join(map(str, sorted(which))) for which in (stages, parts))
            message = f"'{name}' is read by the stages {read}, and its gradient is made by the stages {made}"
            raise error("E0502", message, action="begin the stages with other blocks, or leave the pipeline out")
        # a use that gives no gradient (a detached one) owns nothing
        owner = min(parts, default=stages[0])
        uses = _Uses(owner, tuple(s for s in stages if s != owner), tuple(s for s in sorted(parts) if s != owner))
        found[name] = uses
        weight = next(n for n, v in roles.items() if v == Value("parameter", name))
        for stage in uses.copies:
            with graph.inserting_after(weight):
                copy = graph.placeholder(f"{weight.name}_{stage}")
            copy.meta = dict(weight.meta)
            _read_instead(graph, weight, copy, partial(_in_stage, place, stage))
            inputs.insert(_position(graph, copy), Value("parameter", copy_name(name, stage)))
        if parts:
            returned[outputs.index(gradient)] = parts[owner]
        outputs += [Value("gradient", copy_name(name, stage)) for stage in uses.gradients]
        returned += [parts[stage] for stage in uses.gradients]
    output.args = (tuple(returned),)
    graph.eliminate_dead_code()
    graph.lint()
    return Graph(graph_module(old.module, graph), Signature(tuple(inputs), tuple(outputs))), found


def _in_stage(place: Mapping[fx.Node, tuple[int, Any]], stage: int, node: fx.Node) -> bool:
    return node in place and place[node][0] == stage


def _position(graph: fx.Graph, placeholder: fx.Node) -> int:
    return [n for n in graph.nodes if n.op == "placeholder"].index(placeholder)


def _copied(old: Graph) -> tuple[fx.Graph, dict[fx.Node, fx.Node]]:
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    graph.output(graph.graph_copy(old.module.graph, copies))
    for node, copy in copies.items():
        copy.meta = dict(node.meta)
    return graph, copies


def _read_instead(graph: fx.Graph, old: fx.Node, new: fx.Node, mine: Callable[[fx.Node], bool]) -> None:
    """Let the nodes of one stage read another copy, by way of copies of what is made of the weight alone."""
    for user in list(old.users):
        if mine(user):
            user.replace_input_with(old, new)
        elif user.op == "call_function" and _leads_to(user, mine) and all(n is old for n in user.all_input_nodes):
            with graph.inserting_after(user):
                twin = graph.node_copy(user, lambda n: new if n is old else n)
            twin.meta = dict(user.meta)
            _read_instead(graph, user, twin, mine)


def _leads_to(node: fx.Node, mine: Callable[[fx.Node], bool]) -> bool:
    return any(mine(user) or _leads_to(user, mine) for user in node.users if user.op == "call_function")


def _parts(graph: fx.Graph, node: fx.Node, place: Mapping[fx.Node, tuple[int, Any]], name: str) -> dict[int, fx.Node]:
    """What each stage gives to a sum. What is done with the sum afterwards is done with each part."""
    terms = node.all_input_nodes
    if node.target == torch.ops.aten.add.Tensor and len(node.args) == 2 and len(terms) == 2:
        found: dict[int, fx.Node] = {}
        for term in terms:
            for stage, part in _parts(graph, term, place, name).items():
                if stage in found:
                    with graph.inserting_before(node):
                        made = graph.call_function(torch.ops.aten.add.Tensor, (found[stage], part))
                    made.meta = dict(node.meta)
                    part = made
                found[stage] = part
        return found
    sources = node.all_input_nodes
    if len(sources) == 1 and len({place[n][0] for n in (node, sources[0]) if n in place}) == 1:
        below = _parts(graph, sources[0], place, name) if sources[0].target == torch.ops.aten.add.Tensor else {}
        if len(below) > 1:
            return {stage: _again(graph, node, sources[0], part) for stage, part in below.items()}
    if node not in place:
        raise InternalError(f"untie: the gradient of '{name}' belongs to no stage")
    return {place[node][0]: node}


def _again(graph: fx.Graph, node: fx.Node, old: fx.Node, new: fx.Node) -> fx.Node:
    with graph.inserting_after(node):
        made = graph.node_copy(node, lambda n: new if n is old else n)
    made.meta = dict(node.meta)
    return made


def _update(old: Graph, uses: Mapping[str, _Uses]) -> Graph:
    graph, copies = _copied(old)
    found = {value: copies[node] for value, node in old.placeholders().items()}
    inputs = list(old.signature.inputs)
    for name, used in uses.items():
        gradient = found.get(Value("gradient", name))
        for stage in used.gradients:
            if gradient is not None:
                copy, gradient = _more(graph, gradient, stage)
                inputs.insert(_position(graph, copy), Value("gradient", copy_name(name, stage)))
    graph.lint()
    return Graph(graph_module(old.module, graph), Signature(tuple(inputs), old.signature.outputs))


def _more(graph: fx.Graph, gradient: fx.Node, stage: int) -> tuple[fx.Node, fx.Node]:
    """The gradient of a further copy, and the sum with it."""
    last = [n for n in graph.nodes if n.op == "placeholder"][-1]
    users = list(gradient.users)
    with graph.inserting_after(last):
        copy = graph.placeholder(f"{gradient.name}_{stage}")
    copy.meta = dict(gradient.meta)
    behind = copy if gradient.op == "placeholder" else gradient
    with graph.inserting_after(behind):
        total = graph.call_function(torch.ops.aten.add.Tensor, (gradient, copy))
    total.meta = dict(gradient.meta)
    mark = replace(annotation(gradient), phase="update")
    total.meta["meshwright"] = mark
    for user in users:
        user.replace_input_with(gradient, total)
    return copy, total
