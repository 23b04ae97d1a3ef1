"""Faults that a compiler could make, each put into a compiled program that works: the tiers must tell every one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import fx

from meshwright.compiler.graph import collectives
from meshwright.compiler.graph.pipeline_program import Compiled, PipelineProgram
from meshwright.compiler.graph.program import Value
from meshwright.compiler.mesh import MICRO, Segment, Sharding
from meshwright.compiler.schedules.instructions import Compute
from tests.equivalence.editing import (
    behind,
    calls,
    done,
    inputs,
    micro,
    output,
    pays,
    scaled,
    set_argument,
    set_output,
    skip,
    swap_readers,
    update,
)
from tests.models import Variant
from tests.parity.harness import Cell, Task

aten = torch.ops.aten
DROPPED = Variant(dropout=0.1)
SEQUENCE = Cell(Task("gpt.mw", DROPPED), "fsdp=2,tp=2,sp", 4, 2)
TENSOR = Cell(Task("gpt.mw"), "tp=2", 2)
PADDED = Cell(Task("Llama"), "tp=3", 3)
DATA = Cell(Task("gpt.mw"), "ddp=2", 2)
SHARDED = Cell(Task("Llama"), "fsdp=2,tp=2", 4)
STATE = Cell(Task("gpt.mw"), "zero1=2", 2)
GRADIENTS = Cell(Task("gpt.mw"), "zero2=2", 2, 4)
TIED = Cell(Task("Llama", Variant(tied=True)), "fsdp=2", 2)
AHEAD = Cell(Task("Llama"), "fsdp=2,prefetch=1", 2)
HOST = Cell(Task("gpt.mw"), "fsdp=2,offload", 2)
AGAIN = Cell(Task("gpt.mw", DROPPED), "fsdp=2,recompute", 2, 2)
HYBRID = Cell(Task("GPT-2"), "ddp=2,fsdp=2", 4)
PIPED = Cell(Task("gpt.mw", Variant(layers=3)), "pp=2,ddp=2,schedule=1f1b", 4, 4)
APART = Cell(Task("gpt.mw", Variant(layers=3)), "pp=2,schedule=zb-h1", 2, 4)
TIED_PIPE = Cell(Task("gpt.mw", Variant(layers=3)), "pp=2,schedule=gpipe", 2, 2)
MUON = Cell(Task("Llama", optimizer="Muon"), "fsdp=2", 2)


@dataclass(frozen=True)
class Fault:
    """One fault: its class, what it is put into, and how."""

    name: str
    cell: Cell
    put: Callable[[Compiled], None]

    def __str__(self) -> str:
        return self.name


FAULTS: list[Fault] = []


def fault(name: str, cell: Cell) -> Callable[[Callable[[Compiled], None]], Callable[[Compiled], None]]:
    def add(put: Callable[[Compiled], None]) -> Callable[[Compiled], None]:
        FAULTS.append(Fault(name, cell, put))
        return put

    return add


# sums: missing, doubled, over the wrong axis, of the wrong kind


@fault("sum missing over tensor, forward", TENSOR)
def _(c: Compiled) -> None:
    skip(micro(c), pays(micro(c), "tensor", "forward")[1])


@fault("sum missing over tensor, backward", TENSOR)
def _(c: Compiled) -> None:
    skip(micro(c), calls(micro(c), collectives.all_reduce, lambda n: n.meta["meshwright"].phase == "backward")[0])


@fault("sum doubled over tensor", TENSOR)
def _(c: Compiled) -> None:
    behind(micro(c), pays(micro(c), "tensor", "forward")[1], collectives.all_reduce, ("tensor",), "sum")


@fault("sum of gradients missing over the replicas", DATA)
def _(c: Compiled) -> None:
    graph = update(c)
    node = calls(graph, collectives.all_reduce_many)[0]
    for item in list(node.users):
        skip(graph, item, node.args[0][item.args[1]])


@fault("sum of gradients doubled over the replicas", DATA)
def _(c: Compiled) -> None:
    item = next(iter(calls(update(c), collectives.all_reduce_many)[0].users))
    behind(update(c), item, collectives.all_reduce, ("replica",), "sum")


@fault("sum over the wrong axis", SHARDED)
def _(c: Compiled) -> None:
    node = calls(micro(c), collectives.all_reduce, lambda n: n.args[1] == ("tensor",) and n.args[2] == "sum")[0]
    set_argument(micro(c), node, 1, ("data",))


@fault("maximum in place of a sum", TENSOR)
def _(c: Compiled) -> None:
    node = calls(micro(c), collectives.all_reduce, lambda n: n.args[2] == "sum")[0]
    set_argument(micro(c), node, 2, "max")


@fault("sum in place of a logsumexp", TENSOR)
def _(c: Compiled) -> None:
    node = calls(micro(c), collectives.all_reduce, lambda n: n.args[2] == "logsumexp")[0]
    set_argument(micro(c), node, 2, "sum")


@fault("part taken where a sum has to be scattered", SEQUENCE)
def _(c: Compiled) -> None:
    node = calls(micro(c), collectives.reduce_scatter)[1]
    node.target = collectives.shard
    done(micro(c))


@fault("gradients of norms under sequence sharding not summed", Cell(Task("Llama"), "tp=2,sp", 2))
def _(c: Compiled) -> None:
    graph = update(c)
    node = calls(graph, collectives.all_reduce_many, lambda n: "tensor" in n.args[1])[0]
    node.args = (node.args[0], tuple(a for a in node.args[1] if a != "tensor"), *node.args[2:])
    done(graph)


@fault("loss declared paid over the replicas", DATA)
def _(c: Compiled) -> None:
    value, _ = output(micro(c), "loss")
    micro(c).outputs[value] = micro(c).outputs[value].without({"replica"})


@fault("gradient of the last microbatch alone counts", GRADIENTS)
def _(c: Compiled) -> None:
    value, _ = output(micro(c), "gradient")
    micro(c).outputs[value] = micro(c).outputs[value].without({MICRO})


@fault("gradient accumulated twice", GRADIENTS)
def _(c: Compiled) -> None:
    _, node = output(micro(c), "gradient", 1)
    behind(micro(c), node, aten.add.Tensor, node)


# factors: wrong divisors, losses


@fault("gradients divided by the number of replicas", DATA)
def _(c: Compiled) -> None:
    scaled(update(c), next(iter(calls(update(c), collectives.all_reduce_many)[0].users)), 0.5)


@fault("loss is a mean of the ranks' means", Cell(Task("Llama"), "ddp=2", 2))
def _(c: Compiled) -> None:
    graph = c.prologue
    node = calls(graph, collectives.all_reduce)[0]
    behind(graph, node.args[0], aten.mul.Tensor, 2)
    node = calls(graph, collectives.all_reduce)[0]
    skip(graph, node)


@fault("tokens counted on the rank alone", DATA)
def _(c: Compiled) -> None:
    skip(c.prologue, calls(c.prologue, collectives.all_reduce)[0])


@fault("loss scaled by an axis", TENSOR)
def _(c: Compiled) -> None:
    _, node = output(micro(c), "loss")
    scaled(micro(c), node, 2.0)


@fault("a constant factor changed", DATA)
def _(c: Compiled) -> None:
    node = calls(update(c), "aten.mul.Tensor", lambda n: isinstance(n.args[1], float))[0]
    set_argument(update(c), node, 1, node.args[1] * 0.5)


# gathers: stale, in the wrong order, of the wrong dim


@fault("stale gather: a block computes with the weights of the one before", SHARDED)
def _(c: Compiled) -> None:
    graph = micro(c)
    first, second = calls(graph, collectives.all_gather_many, lambda n: len(n.args[0]) > 4)[:2]
    old = next(u for u in first.users if u.args[1] == 1)
    skip(graph, next(u for u in second.users if u.args[1] == 1), old)


@fault("weights of one message taken in the wrong order", AHEAD)
def _(c: Compiled) -> None:
    graph = micro(c)
    for node in calls(graph, collectives.wait):
        items = sorted(node.users, key=lambda u: u.args[1])
        alike = [(a, b) for a in items for b in items if a is not b and a.meta["val"].shape == b.meta["val"].shape]
        if alike:
            a, b = alike[0]
            a.args, b.args = b.args, a.args
            done(graph)
            return
    raise AssertionError


@fault("gather along another dim", Cell(Task("GPT-2"), "fsdp=2", 2))
def _(c: Compiled) -> None:
    graph = micro(c)
    for node in calls(graph, collectives.all_gather_many):
        for i, (x, dim) in enumerate(zip(node.args[0], node.args[1], strict=True)):
            shape = x.meta["val"].shape
            if len(shape) == 2 and node.args[3][i] == shape[1 - dim]:
                dims = list(node.args[1])
                dims[i] = 1 - dim
                sizes = list(node.args[3])
                sizes[i] = shape[1 - dim] * 2
                node.args = (node.args[0], dims, node.args[2], sizes)
                item = next(u for u in node.users if u.args[1] == i)
                whole = torch.Size((shape[0] * 2, shape[1])) if dim == 0 else torch.Size((shape[0], shape[1] * 2))
                behind(graph, item, aten.reshape.default, list(whole))
                return
    raise AssertionError


@fault("shards of two axes joined in the wrong order", Cell(Task("gpt.mw"), "fsdp=2,tp=2", 4))
def _(c: Compiled) -> None:
    for name, lies in c.layouts.items():
        for graph in (micro(c), update(c)):
            value = Value("parameter", name)
            turned = _turned(lies.rest)
            if turned != lies.rest and value in graph.inputs:
                for one in (micro(c), update(c)):
                    one.inputs[value] = turned
                update(c).outputs[value] = turned
                c.layouts[name] = replace(lies, rest=turned)
                return
    raise AssertionError


def _turned(sharding: Sharding) -> Sharding:
    dims = tuple(tuple(Segment(s.size, s.axes[::-1]) for s in dim) for dim in sharding.dims)
    return Sharding(dims, sharding.partial)


@fault("activation scattered along another dim", Cell(Task("gpt.mw"), "tp=2,sp", 2))
def _(c: Compiled) -> None:
    graph = micro(c)
    node = calls(graph, collectives.shard)[0]
    shape = node.args[0].meta["val"].shape
    made = behind(graph, node, aten.reshape.default, list(node.meta["val"].shape))
    set_argument(graph, made.args[0], 1, len(shape) - 1)


# offsets: vocabulary, positions, masks


@fault("vocabulary offset of the embedding missing", TENSOR)
def _(c: Compiled) -> None:
    set_argument(micro(c), calls(micro(c), "meshwright.embedding.default")[0], 2, 0)


@fault("vocabulary offset of the labels missing", TENSOR)
def _(c: Compiled) -> None:
    set_argument(micro(c), calls(micro(c), "meshwright.pick")[0], 2, 0)


@fault("vocabulary offset of the loss' gradient missing", TENSOR)
def _(c: Compiled) -> None:
    set_argument(micro(c), calls(micro(c), "meshwright.cross_entropy_backward")[0], 4, 0)


@fault("vocabulary offset of the embedding's gradient missing", TENSOR)
def _(c: Compiled) -> None:
    set_argument(micro(c), calls(micro(c), "meshwright.embedding_backward")[0], 3, 0)


@fault("vocabulary offset counts the wrong stride", TENSOR)
def _(c: Compiled) -> None:
    node = calls(micro(c), collectives.offset)[0]
    ((axis, step),) = node.args[0]
    set_argument(micro(c), node, 0, ((axis, step - 1),))


@fault("positions not cut with the sequence", Cell(Task("gpt.mw"), "tp=2,sp", 2))
def _(c: Compiled) -> None:
    graph = micro(c)
    node = calls(graph, collectives.shard)[0]
    node.target, node.args = aten.slice.Tensor, (node.args[0], 0, 0, node.meta["val"].shape[0], 1)
    done(graph)


@fault("attention without its causal mask", TENSOR)
def _(c: Compiled) -> None:
    node = calls(micro(c), "meshwright.attention.default", lambda n: n.args[5] is True)[0]
    set_argument(micro(c), node, 5, False)


@fault("dropout: every shard draws the mask of the first", SEQUENCE)
def _(c: Compiled) -> None:
    node = calls(micro(c), "meshwright.dropout")[0]
    set_argument(micro(c), node, 5, [node.args[5][0], 0, 0])


@fault("dropout: every microbatch draws the mask of the first", SEQUENCE)
def _(c: Compiled) -> None:
    graph = micro(c)
    node = calls(graph, collectives.offset, lambda n: n.args[0][0][0] == MICRO)[0]
    set_argument(graph, node, 0, node.args[0][1:])


@fault("dropout: two layers draw the same mask", SEQUENCE)
def _(c: Compiled) -> None:
    nodes = calls(micro(c), "meshwright.dropout")
    set_argument(micro(c), nodes[1], 3, nodes[0].args[3])


@fault("dropout: another mask when it is computed again", AGAIN)
def _(c: Compiled) -> None:
    again = [n for n in calls(micro(c), "meshwright.dropout") if n.meta["meshwright"].recomputed]
    set_argument(micro(c), again[0], 3, again[0].args[3] + 1)


@fault("padding not filled before a sum", PADDED)
def _(c: Compiled) -> None:
    for node in calls(micro(c), collectives.fill_padding):
        skip(micro(c), node)


@fault("padding of a logsumexp filled with zeros", PADDED)
def _(c: Compiled) -> None:
    node = calls(micro(c), collectives.fill_padding, lambda n: n.args[4] == float("-inf"))[0]
    set_argument(micro(c), node, 4, 0.0)


@fault("labels are not those of the next token", SHARDED)
def _(c: Compiled) -> None:
    node = calls(micro(c), "aten.slice.Tensor", lambda n: n.args[2] == 1)[0]
    start, end = node.args[2:4]
    length = node.args[0].meta["val"].shape[node.args[1]]
    set_argument(micro(c), node, 3, min(end, length) - 1)
    set_argument(micro(c), node, 2, start - 1)


# the norm, clipping, the update


@fault("norm counts weights that all ranks have once for each", SEQUENCE)
def _(c: Compiled) -> None:
    node = calls(update(c), collectives.all_reduce, lambda n: n.args[1] == ("data",))[0]
    set_argument(update(c), node, 1, ("data", "tensor"))


@fault("norm counts a gradient twice", DATA)
def _(c: Compiled) -> None:
    node = calls(update(c), "meshwright.total")[0]
    set_argument(update(c), node, 0, [*node.args[0], node.args[0][0]])


@fault("norm of the rank's own shards alone", TENSOR)
def _(c: Compiled) -> None:
    node = calls(update(c), collectives.all_reduce)[0]
    skip(update(c), node)


@fault("norm taken before gradients are summed", DATA)
def _(c: Compiled) -> None:
    graph = update(c)
    node = calls(graph, "meshwright.sum_of_squares")[0]
    item = node.args[0]
    set_argument(graph, node, 0, item.args[0].args[0][item.args[1]])


@fault("weights updated with unclipped gradients", DATA)
def _(c: Compiled) -> None:
    graph = update(c)
    squares = calls(graph, "meshwright.sum_of_squares")[0]
    gradient = squares.args[0]
    other = next(u for u in gradient.users if u is not squares)
    skip(graph, other, gradient)


@fault("a weight is not updated", DATA)
def _(c: Compiled) -> None:
    value, _ = output(update(c), "parameter")
    set_output(update(c), value, inputs(update(c), "parameter")[value.name])


@fault("moments of two weights exchanged", STATE)
def _(c: Compiled) -> None:
    state = inputs(update(c), "state")
    names = [n for n in state if n.endswith("/exp_avg")]
    first = next(n for n in names if "Wq" in n)
    second = next(n for n in names if "Wk" in n)
    swap_readers(update(c), state[first], state[second])


@fault("first and second moment exchanged", STATE)
def _(c: Compiled) -> None:
    state = inputs(update(c), "state")
    name = next(n for n in state if n.endswith("/exp_avg"))
    swap_readers(update(c), state[name], state[f"{name}_sq"])


@fault("optimizer state of another shard", STATE)
def _(c: Compiled) -> None:
    for name, sharding in c.state.items():
        if len(sharding.dims) == 2 and sharding.axes and sharding.shape[0] == sharding.shape[1] and "exp_avg" in name:
            break
    else:
        name, sharding = next((n, s) for n, s in c.state.items() if len(s.dims) == 2 and s.axes)
    c.state[name] = (
        Sharding(sharding.dims[::-1])
        if sharding.shape[0] == sharding.shape[1]
        else Sharding(tuple((Segment(n),) for n in sharding.shape))
    )


@fault("checkpoint resharded wrongly: state lies along another dim than the update takes it", STATE)
def _(c: Compiled) -> None:
    for name, sharding in c.state.items():
        axes = next((s.axes for _, _, s in sharding.segments() if s.axes), ())
        cut = [d for d, dim in enumerate(sharding.dims) if any(s.axes for s in dim)]
        if len(sharding.dims) == 2 and axes and all(n % 2 == 0 for n in sharding.shape):
            other = 1 - cut[0]
            c.state[name] = Sharding(
                tuple((Segment(n, axes if d == other else ()),) for d, n in enumerate(sharding.shape))
            )
            return
    raise AssertionError


@fault("Muon: a gathered matrix is scaled", MUON)
def _(c: Compiled) -> None:
    graph = update(c)
    node = next(
        n
        for n in graph.module.graph.nodes
        if n.target in (collectives.all_gather, collectives.all_gather_many) and n.meta["meshwright"].phase == "update"
    )
    item = next(iter(node.users)) if node.target is collectives.all_gather_many else node
    behind(graph, item, aten.mul.Tensor, 1.5)


# tied weights


@fault("gradient of one use of a tied weight dropped", TIED)
def _(c: Compiled) -> None:
    graph = micro(c)
    value, _ = next(
        (v, n)
        for v, n in zip(graph.signature.outputs, range(99), strict=False)
        if v.kind == "gradient" and "embed" in v.name
    )
    (end,) = graph.module.graph.find_nodes(op="output")
    node: fx.Node = end.args[0][graph.signature.outputs.index(value)]
    while node.target is not aten.add.Tensor:
        node = node.all_input_nodes[0]
    skip(graph, node)


@fault("gradient of the other stage's copy of a tied weight dropped", TIED_PIPE)
def _(c: Compiled) -> None:
    assert isinstance(c, PipelineProgram)
    graph = c.update_graphs[0] if len(c.stages[0].update) == 1 else c.stages[0].update[-1]
    skip(graph, calls(graph, aten.add.Tensor)[0])


# microbatches and pipelines


@fault("inputs and labels of other samples", Cell(Task("Llama"), "ddp=2", 2, 4))
def _(c: Compiled) -> None:
    value = Value("batch", "input_ids")
    (dim, time) = micro(c).inputs[value].dims
    assert len(dim) == 2
    micro(c).inputs[value] = Sharding(((Segment(16, ("replica", MICRO)),), time))


@fault("the gradient of weights is computed twice for a microbatch", APART)
def _(c: Compiled) -> None:
    assert isinstance(c, PipelineProgram)
    row = list(c.programs[0])
    at = next(i for i, x in enumerate(row) if isinstance(x, Compute) and "W" in x.name)
    row.insert(at, row[at])
    c.programs = (tuple(row), *c.programs[1:])


@fault("the gradient of weights is left out for a microbatch", APART)
def _(c: Compiled) -> None:
    assert isinstance(c, PipelineProgram)
    row = list(c.programs[0])
    at = next(i for i, x in enumerate(row) if isinstance(x, Compute) and "W" in x.name)
    del row[at]
    c.programs = (tuple(row), *c.programs[1:])


@fault("two stages give the loss", PIPED)
def _(c: Compiled) -> None:
    assert isinstance(c, PipelineProgram)
    last, other = c.stages[-1].passes, c.stages[0].passes["F"]
    value = next(v for v in last["F"].signature.outputs if v.kind == "loss")
    (end,) = other.module.graph.find_nodes(op="output")
    made = other.module.graph
    with made.inserting_before(end):
        again = made.call_function(aten.sum.default, (end.args[0][0],))
    again.meta = {"meshwright": replace(end.args[0][0].meta["meshwright"], shape=())}
    end.args = ((*end.args[0], again),)
    other.signature = replace(other.signature, outputs=(*other.signature.outputs, value))
    other.outputs[value] = last["F"].outputs[value]
    done(other)


@fault("a stage's gradient scaled by the number of microbatches", PIPED)
def _(c: Compiled) -> None:
    graph = c.stages[1].passes["I"]  # type: ignore[union-attr]
    _, node = output(graph, "gradient")
    scaled(graph, node, 0.25)


@fault("a stage reads a weight of another stage", PIPED)
def _(c: Compiled) -> None:
    assert isinstance(c, PipelineProgram)
    graph = c.stages[1].passes["F"]
    signature = list(graph.signature.inputs)
    at = next(i for i, v in enumerate(signature) if v.kind == "parameter" and "Wq" in v.name)
    other = next(v for v in c.stages[0].passes["F"].signature.inputs if v.kind == "parameter" and "Wq" in v.name)
    graph.inputs[other] = graph.inputs.pop(signature[at])
    signature[at] = other
    graph.signature = replace(graph.signature, inputs=tuple(signature))


@fault("state written back into the place of another", HOST)
def _(c: Compiled) -> None:
    graph = update(c)
    nodes = calls(graph, torch.ops.meshwright.to_host.default)
    first = nodes[0]
    second = next(n for n in nodes[1:] if n.args[0].meta["val"].shape == first.args[0].meta["val"].shape)
    first.args, second.args = (second.args[0], first.args[1]), (first.args[0], second.args[1])
    done(graph)


@fault("a message's result is read before what it needs: a gradient of the block before", AHEAD)
def _(c: Compiled) -> None:
    graph = micro(c)
    begins = calls(graph, collectives.reduce_scatter_begin)
    for first, second in pairwise(begins):
        for i, x in enumerate(first.args[0]):
            for j, y in enumerate(second.args[0]):
                if (x.meta["val"].shape == y.meta["val"].shape and x is not y and i != j) or (x is not y and i == j):
                    tensors = list(second.args[0])
                    if tensors[j].meta["val"].shape != x.meta["val"].shape:
                        continue
                    tensors[j] = x
                    set_argument(graph, second, 0, tensors)
                    return
    raise AssertionError


@fault("statistics of the replica's batch", HYBRID)
def _(c: Compiled) -> None:
    graph = micro(c)
    node = next(n for n in graph.module.graph.nodes if str(n.target).startswith("aten.native_layer_norm.default"))
    set_argument(graph, node, 4, 1e-2)


@fault("residual added on every rank before the sum", TENSOR)
def _(c: Compiled) -> None:
    graph = micro(c)
    node = next(n for n in pays(graph, "tensor", "forward") if any(u.target is aten.add.Tensor for u in n.users))
    add = next(u for u in node.users if u.target is aten.add.Tensor)
    add.replace_input_with(node, node.args[0])
    behind(graph, add, collectives.all_reduce, ("tensor",), "sum")
