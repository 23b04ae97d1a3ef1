"""The update that writes in place gives what the functional one gives, and frees what it can."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch import Tensor, fx

from meshwright.compiler.graph.program import Signature, Value
from meshwright.compiler.graph.rank_program import LocalGraph
from meshwright.compiler.mesh import Sharding
from meshwright.runtime.inplace import update_in_place

aten = torch.ops.aten
A, B = Value("parameter", "a"), Value("parameter", "b")
GA, GB = Value("gradient", "a"), Value("gradient", "b")
NORM = Value("norm", "norm")


def graph_of(inputs: list[Value], outputs: dict[Value, fx.Node], graph: fx.Graph) -> LocalGraph:
    graph.output(tuple(outputs.values()))
    whole = dict.fromkeys([*inputs, *outputs], Sharding(()))
    return LocalGraph(
        fx.GraphModule(torch.nn.Module(), graph), Signature(tuple(inputs), tuple(outputs)), whole, whole
    )  # fmt: skip


def build(kind: str) -> LocalGraph:
    graph = fx.Graph()
    inputs = [A, B, GA, GB]
    a, b, ga, gb = (graph.placeholder(f"{v.kind}_{v.name}") for v in inputs)
    call = graph.call_function
    outputs: dict[Value, fx.Node]
    if kind == "swap":  # each new value is the other's old one
        outputs = {A: b, B: a}
    elif kind == "read late":  # a view of the old value is read after its new one is known
        view = call(aten.view.default, (a, [4]))
        new = call(aten.sub.Tensor, (a, ga))
        outputs = {A: new, B: call(aten.add.Tensor, (new, call(aten.view.default, (view, [2, 2]))))}
    elif kind == "norm of old":  # the value that is returned lives in a written parameter
        outputs = {A: call(aten.mul.Tensor, (a, 2)), B: b, NORM: call(aten.view.default, (a, [4]))}
    else:
        first, second = call(aten.add.Tensor, (ga, 1)), call(aten.add.Tensor, (gb, 1))
        outputs = {A: call(aten.sub.Tensor, (a, first)), B: call(aten.sub.Tensor, (b, second))}
    return graph_of(inputs, outputs, graph)


@pytest.mark.parametrize("kind", ["plain", "swap", "read late", "norm of old"])
def test_equals_the_functional_update(kind: str) -> None:
    graph = build(kind)
    values = [torch.randn(2, 2) for _ in graph.signature.inputs]
    expected = dict(zip(graph.signature.outputs, graph.module(*[v.clone() for v in values]), strict=True))
    made = update_in_place(graph)
    returned = dict(zip(made.outputs, made.module(list(values)), strict=True))
    for value, tensor in expected.items():
        found = values[graph.signature.inputs.index(value)] if value.kind == "parameter" else returned[value]
        assert torch.equal(found, tensor), value


def test_a_gradient_is_freed_before_the_next_parameter_is_updated() -> None:
    alive: list[bool] = []
    gradient: list[weakref.ref[Tensor]] = []

    def look(x: Tensor) -> Tensor:
        alive.append(gradient[0]() is not None)
        return x + 1

    graph = build("plain")
    for node in graph.module.graph.nodes:
        if node.target is aten.add.Tensor:
            node.target, node.args = look, node.args[:1]
    graph.module.recompile()
    made = update_in_place(graph)
    inputs = [torch.randn(2, 2) for _ in graph.signature.inputs]
    gradient.append(weakref.ref(inputs[2]))
    made.module(inputs)
    assert inputs == []
    assert alive == [True, False]


def test_one_parameter_is_finished_after_the_other() -> None:
    made = update_in_place(build("plain"))
    names = [str(n.target) for n in made.module.graph.nodes if n.op == "call_function"]
    assert names == ["aten.add.Tensor", "aten.sub.Tensor", "aten.copy_.default"] * 2
