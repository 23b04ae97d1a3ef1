"""Faults in what a rank computes: sums over axes, factors, gathers, offsets of shards."""

from __future__ import annotations

from dataclasses import replace

import torch

from meshwright.compiler.graph import collectives
from meshwright.compiler.graph.pipeline_program import Compiled
from meshwright.compiler.graph.program import Value
from meshwright.compiler.mesh import MICRO, Segment, Sharding
from tests.equivalence.editing import (
    behind,
    calls,
    done,
    micro,
    output,
    pays,
    scaled,
    set_argument,
    skip,
    update,
)
from tests.equivalence.faulty import (
    AGAIN,
    AHEAD,
    DATA,
    GRADIENTS,
    PADDED,
    SEQUENCE,
    SHARDED,
    TENSOR,
    fault,
)
from tests.parity.harness import Cell, Task

aten = torch.ops.aten


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
