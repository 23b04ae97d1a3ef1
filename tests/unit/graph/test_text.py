"""The textual form of graphs: print, parse, print is a fixed point, and the parsed graph is equal and runs equal."""

from __future__ import annotations

import math
import operator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx

from meshwright.compiler.diagnostics import InternalError, MeshwrightError, Origin, Span
from meshwright.compiler.graph import collectives
from meshwright.compiler.graph.fake import fake_tensor
from meshwright.compiler.graph.program import Graph, Signature, Value, annotation
from meshwright.compiler.graph.rank_program import LocalGraph
from meshwright.compiler.graph.redistribute import redistribute
from meshwright.compiler.graph.text import print_graph
from meshwright.compiler.graph.text_parser import parse_graph, parse_local_graph
from meshwright.compiler.mesh import Segment, Sharding, parse_sharding

aten = torch.ops.aten
LITERALS = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats()
    | st.text()
    | st.sampled_from([torch.float32, torch.bfloat16, torch.bool, torch.device("cpu"), torch.device("cuda:1")])
    | st.sampled_from([torch.strided, torch.contiguous_format])
    | st.complex_numbers(allow_nan=False)
    | st.builds(slice, st.none() | st.integers(-9, 9), st.none() | st.integers(-9, 9), st.none() | st.integers(1, 9)),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=5), inner, max_size=2)
    ),
    max_leaves=6,
)
SHARDINGS = st.builds(
    Sharding,
    st.lists(
        st.lists(
            st.builds(Segment, st.integers(1, 9), st.sampled_from([(), ("data",), ("a", "b_1")])),
            min_size=1,
            max_size=3,
        ).map(tuple),
        max_size=3,
    ).map(tuple),
    st.frozensets(st.tuples(st.sampled_from(["x", "micro"]), st.sampled_from(["sum", "max"])), max_size=2),
)


def described(value: Any) -> Any:
    """A value in which equal arguments are equal: nodes by name, nan equal to itself, types kept apart."""
    if isinstance(value, fx.Node):
        return ("node", value.name)
    if isinstance(value, float):
        return "nan" if math.isnan(value) else ("float", value, math.copysign(1, value))
    if isinstance(value, (list, tuple)):
        return ("list" if isinstance(value, list) else "tuple", tuple(map(described, value)))
    if isinstance(value, dict):
        return tuple((k, described(v)) for k, v in value.items())
    if isinstance(value, slice):
        return ("slice", value.start, value.stop, value.step)
    return (type(value).__name__, value)


def assert_same(first: Graph | LocalGraph, second: Graph | LocalGraph) -> None:
    assert first.signature == second.signature
    nodes, others = list(first.module.graph.nodes), list(second.module.graph.nodes)
    assert len(nodes) == len(others)
    for a, b in zip(nodes, others, strict=True):
        assert (a.name, a.op) == (b.name, b.op) or a.op == "output"
        if a.op == "call_function":
            assert a.target is b.target
        assert described(a.args) == described(b.args)
        assert described(a.kwargs) == described(b.kwargs)
        if a.op != "output":
            mine, theirs = annotation(a), annotation(b)
            assert tuple(mine.shape) == tuple(theirs.shape)
            assert (mine.dtype, mine.sharding, mine.block, mine.phase, mine.origin) == (
                theirs.dtype, theirs.sharding, theirs.block, theirs.phase, theirs.origin,
            )  # fmt: skip


@st.composite
def programs(draw: st.DrawFn) -> Graph:
    """A random graph that runs: some inputs, pointwise ops, contractions, several results, tuples."""
    graph = fx.Graph()
    values: list[fx.Node] = []
    roles = []
    for index in range(draw(st.integers(1, 3))):
        node = graph.placeholder(f"input_{index}")
        node.meta["val"] = fake_tensor((4, 4), torch.float64)
        values.append(node)
        roles.append(Value(draw(st.sampled_from(["parameter", "batch"])), f"{draw(st.text(max_size=4))}{index}"))
    for _ in range(draw(st.integers(1, 6))):
        a, b = draw(st.sampled_from(values)), draw(st.sampled_from(values))
        kind = draw(st.integers(0, 4))
        if kind == 0:
            node = graph.call_function(aten.add.Tensor, (a, b), {"alpha": draw(st.integers(1, 3))})
        elif kind == 1:
            node = graph.call_function(aten.mm.default, (a, b))
        elif kind == 2:
            node = graph.call_function(aten.clamp.default, (a, draw(st.floats(-2, 0)), None))
        elif kind == 3:
            node = graph.call_function(redistribute, (a, str(draw(SHARDINGS)), str(draw(SHARDINGS))))
        else:
            pair = graph.call_function(aten.var_mean.correction, (a, [1]), {"correction": 0, "keepdim": True})
            pair.meta["val"] = (fake_tensor((4, 1), torch.float64),) * 2
            item = graph.call_function(operator.getitem, (pair, draw(st.integers(0, 1))))
            item.meta["val"] = fake_tensor((4, 1), torch.float64)
            node = graph.call_function(aten.mul.Tensor, (a, item))
        node.meta["val"] = fake_tensor((4, 4), torch.float64)
        note = annotation(node)
        note.block = draw(st.sampled_from(["", "model.layers.0", "backward", "a@b"]))
        note.phase = draw(st.sampled_from(["forward", "backward"]))
        note.sharding = draw(st.none() | SHARDINGS)
        note.origin = draw(
            st.sampled_from([Origin(), Origin("a.b", "/x y/m.py", 3, "z = f(x) | y"), Origin("", "m.py", 7)])
        )
        values.append(node)
    results = draw(st.lists(st.sampled_from(values), min_size=1, max_size=3))
    graph.output(tuple(results))
    outputs = tuple(Value("result", str(i)) for i in range(len(results)))
    return Graph(fx.GraphModule(torch.nn.Module(), graph), Signature(tuple(roles), outputs))


@settings(max_examples=60, deadline=None)
@given(programs(), st.integers(0, 2**30))
def test_print_parse_print_is_a_fixed_point_and_runs_equal(graph: Graph, seed: int) -> None:
    text = print_graph(graph, "micro", origins=True)
    name, parsed = parse_graph(text)
    assert name == "micro"
    assert print_graph(parsed, name, origins=True) == text
    assert_same(graph, parsed)
    torch.manual_seed(seed)
    inputs = [torch.randn(4, 4, dtype=torch.float64) for _ in graph.signature.inputs]
    whole, again = (fx.Interpreter(g.module).run(*inputs) for g in (graph, parsed))
    for mine, theirs in zip(whole, again, strict=True):
        assert torch.equal(mine, theirs) or bool(torch.isnan(mine).any())
        assert mine.shape == theirs.shape


@settings(max_examples=150, deadline=None)
@given(st.lists(LITERALS, max_size=3), st.dictionaries(st.sampled_from(["dtype", "n", "inf_"]), LITERALS, max_size=2))
def test_every_literal_is_read_back(args: list[Any], kwargs: dict[str, Any]) -> None:
    graph = fx.Graph()
    node = graph.call_function(collectives.shard, tuple(args), kwargs)
    graph.output((node,))
    whole = Graph(fx.GraphModule(torch.nn.Module(), graph), Signature((), (Value("result", "a"),)))
    text = print_graph(whole, "g")
    assert len(text.splitlines()) == 3  # one op a line, whatever is in a string
    parsed = parse_graph(text)[1]
    assert_same(whole, parsed)
    assert print_graph(parsed, "g") == text


def test_a_local_graph_keeps_whole_and_local_shapes() -> None:
    text = (
        "local graph micro\n"
        '  %w: f32[4, 4] of [8@data, 4] = input parameter "w"\n'
        '  %x: f32[4] = input batch "x"\n'
        '  %all_gather: f32[8, 4] = all_gather(%w, 0, ("data",), 8)  # model.layers.0\n'
        '  %offset = offset(("data", 4))\n'
        "  %pair: (f32[2], None) = aten.native_batch_norm.default(%x)  # backward\n"
        '  output gradient "w": [8@data, 4] +micro = %all_gather\n'
        '  output result "none": [] = None\n'
    )
    name, graph = parse_local_graph(text)
    assert print_graph(graph, name) == text
    assert graph.inputs[Value("parameter", "w")] == parse_sharding("[8@data, 4]")
    assert graph.outputs[Value("gradient", "w")] == parse_sharding("[8@data, 4] +micro")
    gathered = next(n for n in graph.module.graph.nodes if n.name == "all_gather")
    assert gathered.meta["val"].shape == (8, 4)
    assert annotation(gathered).block == "model.layers.0"


@pytest.mark.parametrize(
    ("text", "message", "line", "column"),
    [
        ("", "there is no graph", 1, 1),
        ("grap x", "begins with its name", 1, 1),
        ("graph a\n  %x = aten.mul.Tensor(%y)", "%y is not defined", 2, 24),
        ("graph a\n  %x = aten.mull.Tensor()", "unknown op", 2, 8),
        ('graph a\n  %x = input bach "x"', "unknown role", 2, 14),
        ('graph a\n  %x: f31[3] = input batch "x"', "no dtype", 2, 7),
        ('graph a\n  %x: f32[3y] = input batch "x"', "3y", 2, 10),
        ("graph a\n  %x = all_gather(3 4)", "expected ','", 2, 21),
        ("graph a\n  %x = all_gather()\n  %x = all_gather()", "defined twice", 3, 6),
        ("graph a\n  %x = all_gather(", "expected a value", 2, 19),
        ("graph a\n  %x = all_gather(device(3))", "does not take", 2, 28),
        ("graph a\n  x = 3", "begins with", 2, 3),
    ],
)
def test_faults_point_at_their_place(text: str, message: str, line: int, column: int) -> None:
    with pytest.raises(MeshwrightError, match="E0150") as caught:
        parse_graph(text, "a.ir")
    (found,) = caught.value.diagnostics
    assert message in found.message
    assert isinstance(found.place, Span)
    assert (found.place.file, found.place.line, found.place.column) == ("a.ir", line, column)


def test_a_function_without_a_name_is_refused() -> None:
    graph = fx.Graph()
    graph.output((graph.call_function(print, ()),))
    with pytest.raises(InternalError, match="no textual form"):
        print_graph(Graph(fx.GraphModule(torch.nn.Module(), graph), Signature((), (Value("result", "a"),))), "g")
