"""Where communication begins and where it is waited for, and how much of it is there at once."""

from __future__ import annotations

import operator
from dataclasses import replace
from functools import cache

import pytest
from torch import fx

from meshwright.compiler.analysis.inplace import in_place
from meshwright.compiler.analysis.summarize import summarize
from meshwright.compiler.communication import communication
from meshwright.compiler.diagnostics import InternalError
from meshwright.compiler.emit.python import emit_python
from meshwright.compiler.graph import collectives
from meshwright.compiler.graph.program import Value, annotation
from meshwright.compiler.graph.rank_program import LocalGraph, RankProgram
from meshwright.compiler.graph.text import print_graph
from meshwright.compiler.graph.text_parser import parse_local_graph
from meshwright.compiler.memory import memory
from meshwright.compiler.passes.begin import verify_waits
from meshwright.compiler.passes.compile import compile_step
from meshwright.compiler.passes.presets import preset
from meshwright.runtime.communicator import axes_used
from tests.unit.passes.test_structure import LAYERS, program

PLANS = ["fsdp=4", "fsdp=2,tp=2", "fsdp=2,tp=2,sp", "ddp=2,fsdp=2", "zero1=4", "zero2=4", "ddp=4", "tp=2"]


@cache
def compiled(text: str, prefetch: int = 1, microbatches: int = 1) -> RankProgram:
    plan = replace(preset(text, program()), prefetch=prefetch, microbatches=microbatches)
    return compile_step(program(), plan)


def nodes_of(graph: LocalGraph) -> list[fx.Node]:
    return list(graph.module.graph.nodes)


def begins(nodes: list[fx.Node], target: object) -> list[fx.Node]:
    return [n for n in nodes if n.target is target]


def wait_of(begin: fx.Node) -> fx.Node:
    (wait,) = begin.users
    assert wait.target is collectives.wait
    return wait


def stored(graph: LocalGraph) -> set[fx.Node]:
    inputs = [n for n in nodes_of(graph) if n.op == "placeholder"]
    return {n for n, v in zip(inputs, graph.signature.inputs, strict=True) if v.kind == "parameter"}


def weights(graph: LocalGraph) -> list[fx.Node]:
    """The begins of gathers of stored weights."""
    found = begins(nodes_of(graph), collectives.all_gather_begin)
    return [n for n in found if set(n.all_input_nodes) <= stored(graph)]


def last_reader(node: fx.Node, position: dict[fx.Node, int]) -> int:
    last = position[node]
    for user in node.users:
        copies = user.target in (operator.getitem, collectives.wait)
        last = max(last, last_reader(user, position) if copies else position[user])
    return last


@pytest.mark.parametrize("text", PLANS)
@pytest.mark.parametrize("microbatches", [1, 2])
def test_what_begins_is_waited_for_once_and_all_graphs_run_in_their_order(text: str, microbatches: int) -> None:
    rank = compiled(text, 1, microbatches)
    for graph in (rank.micro, rank.update):
        verify_waits(graph.module.graph)
        graph.module.graph.lint()
    order = in_place(rank.update).order
    position = {n: i for i, n in enumerate(order)}
    assert all(position[i] < position[n] for n in order for i in n.all_input_nodes)
    # messages begin in the order of the graph, and as many of them before each wait
    ahead = [n for n in nodes_of(rank.update) if n.target in (*collectives.BEGINS, collectives.wait)]
    turned = [n for n in order if n.target in collectives.BEGINS]
    assert turned == [n for n in ahead if n in turned]
    for wait in (n for n in ahead if n.target is collectives.wait and n in position):
        before = [n for n in ahead[: ahead.index(wait)] if n.target in collectives.BEGINS]
        assert all(position[b] < position[wait] for b in before)


@pytest.mark.parametrize("prefetch", [1, 2])
def test_weights_are_gathered_so_many_blocks_ahead_in_the_order_of_use(prefetch: int) -> None:
    graph = compiled("fsdp=4", prefetch).micro
    nodes = nodes_of(graph)
    position = {n: i for i, n in enumerate(nodes)}
    found = weights(graph)
    # the embedding, the blocks, the head; backward the blocks, and the head has been kept
    forward = ["", *(f"model.layers.{i}" for i in range(LAYERS)), ""]
    assert [annotation(n).block for n in found] == forward + [f"model.layers.{i}" for i in reversed(range(LAYERS))]
    waits = [wait_of(n) for n in found]
    assert sorted(waits, key=position.__getitem__) == waits
    first = next(i for i, n in enumerate(nodes) if n.op != "placeholder")
    assert [position[n] for n in found[:prefetch]] == list(range(first, first + prefetch))
    for number, begin in enumerate(found[: LAYERS + 2]):
        if number >= prefetch:
            # at once before the weights of the block so far ahead are waited for
            assert position[waits[number - prefetch]] == position[begin] + 1
    # those of the last block come again while the head runs
    head, again = found[LAYERS + 1], found[LAYERS + 2]
    reads = [position[u] for item in wait_of(head).users for u in item.users]
    assert (min(reads) if prefetch == 1 else 0) < position[again] < max(reads)


@pytest.mark.parametrize("text", ["fsdp=4", "fsdp=2,tp=2", "ddp=2,fsdp=2"])
@pytest.mark.parametrize("prefetch", [1, 2])
def test_no_more_than_one_block_more_than_is_prefetched_is_there(text: str, prefetch: int) -> None:
    graph = compiled(text, prefetch).micro
    position = {n: i for i, n in enumerate(nodes_of(graph))}
    lives = [(position[n], last_reader(n, position)) for n in weights(graph)]
    most = max(sum(born <= at <= last for born, last in lives) for at in range(len(position)))
    assert most == prefetch + 1
    # and bytes: the widest run of so many blocks, with the joined shards that are on their way
    sizes = [sum(v.numel() * v.element_size() for v in n.meta["val"]) for n in weights(graph)]
    sent = 1 + 1 / compiled(text).mesh.size("data")
    bound = sent * max(sum(sizes[i : i + prefetch + 1]) for i in range(len(sizes)))
    assert max(sizes) < memory(summarize(compiled(text, prefetch))).most["gathered parameters"] <= bound


@pytest.mark.parametrize("text", ["fsdp=4", "fsdp=2,tp=2", "fsdp=2,tp=2,sp", "zero2=4", "zero1=4", "ddp=4"])
def test_gradients_are_reduced_until_the_next_ones_are_there(text: str) -> None:
    graph = compiled(text).micro
    nodes = nodes_of(graph)
    position = {n: i for i, n in enumerate(nodes)}
    target = collectives.all_reduce_begin if text == "ddp=4" else collectives.reduce_scatter_begin
    found = [n for n in begins(nodes, target) if _leaves(wait_of(n))]
    blocks = [annotation(n).block for n in found]
    assert set(blocks) == {"", *(f"model.layers.{i}" for i in range(LAYERS))}
    for begin in found:
        later = [b for b in found if position[b] > position[begin] and _where(b) != _where(begin)]
        end = position[later[0]] if later else len(nodes)
        between = nodes[position[wait_of(begin)] : end]
        # waited for at once before the next block's begin, or at the end
        assert all(n.target in (collectives.wait, operator.getitem, *collectives.BEGINS) or n.op == "output"
                   for n in between), begin  # fmt: skip
        if later and annotation(later[0]).block:  # after the first block there is but the embedding
            computed = nodes[position[begin] : position[wait_of(begin)]]
            assert any("einsum" in str(n.target) for n in computed), begin


def _leaves(node: fx.Node) -> bool:
    return all(u.op == "output" or (u.target is operator.getitem and _leaves(u)) for u in node.users)


def _where(node: fx.Node) -> object:
    note = annotation(node)
    return (note.phase, note.block) if note.block else node


def test_sums_of_tensor_parallelism_hide_behind_products_of_weight_gradients() -> None:
    graph = compiled("tp=2").micro
    nodes = nodes_of(graph)
    position = {n: i for i, n in enumerate(nodes)}
    found = begins(nodes, collectives.all_reduce_begin)
    assert len(found) >= 2 * LAYERS
    for begin in found:
        assert annotation(begin).phase == "backward"
        between = nodes[position[begin] + 1 : position[wait_of(begin)]]
        products = [n for n in between if "einsum" in str(n.target)]
        assert products, begin
        # they feed gradients alone: nothing of this block waits for them
        assert all(u.op == "output" for n in products for u in n.users) or len(products) > 1
    forward = [n for n in nodes if n.target is collectives.all_reduce and annotation(n).phase == "forward"]
    assert len(forward) == 2 * LAYERS + 3  # what the next op needs stays as it was


def test_with_one_microbatch_data_parallel_gradients_are_paid_in_the_backward_pass() -> None:
    name = Value("gradient", "model.layers.0.self_attn.q_proj.weight")
    for text in ("ddp=4", "ddp=2,fsdp=2", "zero1=4"):
        assert not compiled(text).micro.outputs[name].owed
        assert compiled(text, 1, 2).micro.outputs[name].owed - {"micro"} == compiled(text, 0).micro.outputs[name].owed
        assert compiled(text, 0).micro.outputs[name].owed
    assert str(compiled("zero1=4").micro.outputs[name]) == "[32@data, 32]"
    # sums over tensor too are paid together with those over data, by update
    norm = Value("gradient", "model.norm.weight")
    assert compiled("ddp=2,tp=2").micro.outputs[norm].owed == {"replica", "tensor"}


@pytest.mark.parametrize("text", PLANS)
def test_as_much_is_sent(text: str) -> None:
    """But for what is kept instead of being gathered again, and sums that go in other messages."""

    def total(prefetch: int) -> dict[tuple[str, tuple[str, ...]], int]:
        found: dict[tuple[str, tuple[str, ...]], int] = {}
        for t in communication(summarize(compiled(text, prefetch, 2))):
            found[t.kind, t.axes] = found.get((t.kind, t.axes), 0) + t.payload
        return found

    before, after = total(0), total(1)
    gathers = {key for key in before if key[0] == "all-gather"}
    assert {k: v for k, v in before.items() if k not in gathers} == {k: v for k, v in after.items() if k not in gathers}
    assert all(after[k] <= before[k] for k in gathers)
    assert axes_used(compiled(text, 1, 2)) == axes_used(compiled(text, 0, 2))


@pytest.mark.parametrize("text", ["fsdp=2,tp=2", "zero1=4"])
def test_it_prints_parses_and_is_python(text: str) -> None:
    rank = compiled(text)
    for name, graph in (("micro", rank.micro), ("update", rank.update)):
        written = print_graph(graph, name)
        assert "_begin(" in written and "= wait(" in written
        assert print_graph(parse_local_graph(written)[1], name) == written
        source = emit_python(graph, name)
        assert "collectives.wait(" in source
        compile(source, f"{name}.py", "exec")


def test_a_message_that_nobody_waits_for_is_refused() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    begin = graph.call_function(collectives.all_reduce_begin, ([x], ("data",), "sum"))
    graph.output((x,))
    with pytest.raises(InternalError, match="all_reduce_begin must be waited for once, and is read by nothing"):
        verify_waits(graph)
    assert not begin.users
