"""The quick way of compiling, for prices: the same program comes out."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from meshwright.compiler.analysis.summarize import summarize
from meshwright.compiler.graph.adapter import graph_module
from meshwright.compiler.graph.calls import op_call, operand_nodes
from meshwright.compiler.graph.program import StepProgram
from meshwright.compiler.graph.rank_program import LocalGraph, RankProgram
from meshwright.compiler.graph.text import print_graph
from meshwright.compiler.passes.compile import compile_step
from meshwright.compiler.passes.known_graphs import KnownGraphs
from meshwright.compiler.passes.presets import preset
from meshwright.compiler.plan import Plan, Precision, Recompute
from meshwright.frontend.capture import capture
from tests.models import MODELS, Variant

MIXED = Precision("bf16", "fp32", "fp32")
GRAPHS = ("prologue", "micro", "update")


def captured(name: str, dropout: float = 0.1) -> StepProgram:
    example = MODELS[name](Variant(dropout=dropout), 0)
    optimizer = torch.optim.AdamW(example.model.parameters(), lr=1e-3)
    return capture(example.model, example.batch, optimizer, clip=1.0, precision=MIXED)


def plans(program: StepProgram) -> list[Plan]:
    texts = ("fsdp=8", "fsdp=2,tp=4,sp", "zero1=2,tp=4,micro=2", "ddp=8,micro=2")
    found = [preset(text, program, 8, MIXED) for text in texts]
    block = "layers.*" if any(p.name.startswith("layers.") for p in program.parameters) else "**.*"
    return [
        *found,
        replace(found[0], prefetch=1),
        replace(found[1], prefetch=1, recompute=(Recompute(block, "matmuls"),)),
    ]


def types(graph: LocalGraph) -> list[object]:
    """Shape, dtype and strides of every tensor; the stride of a dim of one element says nothing."""
    found: list[object] = []
    for node in graph.module.graph.nodes:
        value = node.meta.get("val")
        for tensor in value if isinstance(value, (tuple, list)) else (value,):
            if isinstance(tensor, Tensor):
                strides = tuple(s for s, n in zip(tensor.stride(), tensor.shape, strict=True) if n > 1)
                found.append((node.name, tuple(tensor.shape), tensor.dtype, strides))
    return found


def assert_same(first: RankProgram, second: RankProgram) -> None:
    for name in GRAPHS:
        one, other = getattr(first, name), getattr(second, name)
        assert print_graph(one, name) == print_graph(other, name)
        assert types(one) == types(other)
    assert first.layouts == second.layouts and first.state == second.state
    assert summarize(first) == summarize(second)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("GPT-2", marks=pytest.mark.slow),
        pytest.param("Llama", marks=pytest.mark.slow),
        pytest.param("ViT", marks=pytest.mark.slow),
        "gpt.mw",
    ],
)
def test_the_quick_way_gives_the_same_program(name: str) -> None:
    program = captured(name, 0.0 if name.endswith(".mw") else 0.1)
    known = KnownGraphs()
    for plan in plans(program):
        careful = compile_step(program, plan)
        assert_same(careful, compile_step(program, plan, verify=False))
        assert_same(careful, compile_step(program, plan, verify=False, known=known))


def test_graphs_that_do_not_differ_are_compiled_once() -> None:
    program = captured("Llama")
    known = KnownGraphs()
    plan = preset("fsdp=4", program, 4, MIXED)
    first = compile_step(program, plan, verify=False, known=known)
    again = compile_step(program, replace(plan, recompute=(Recompute("model.layers.*"),)), verify=False, known=known)
    assert again.update is first.update and again.prologue is first.prologue and again.micro is not first.micro
    other = compile_step(program, preset("fsdp=2", program, 2, MIXED), verify=False, known=known)
    assert other.update is not first.update
    assert compile_step(program, plan, known=known).update is not first.update


def test_compiled_graphs_run_though_their_code_is_written_late() -> None:
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    graph.output(graph.call_function(torch.ops.aten.add.Tensor, (x, 1)))
    module = graph_module({}, graph)
    assert module(torch.ones(2)).tolist() == [2.0, 2.0] and "aten.add.Tensor" in module.code


def test_what_is_read_off_a_node_follows_its_changes() -> None:
    program = captured("gpt.mw", 0.0)
    node = next(n for n in program.micro.module.graph.nodes if n.target is torch.ops.aten.add.Tensor)
    before, operands = op_call(node), operand_nodes(node)
    assert op_call(node) is before
    node.args = (operands[0], 2.0)
    after = op_call(node)
    assert after != before and operand_nodes(node) == operands[:1]
    node.meta["val"] = node.meta["val"].double()
    changed = op_call(node)
    assert changed is not None and after is not None and changed.results != after.results
