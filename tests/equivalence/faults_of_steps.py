"""Faults in a step as a whole: the norm and the update, tied weights, microbatches and pipelines."""

from __future__ import annotations

from dataclasses import replace
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
from tests.equivalence.faulty import (
    AHEAD,
    APART,
    DATA,
    HOST,
    HYBRID,
    MUON,
    PIPED,
    SEQUENCE,
    STATE,
    TENSOR,
    TIED,
    TIED_PIPE,
    fault,
)
from tests.parity.harness import Cell, Task

aten = torch.ops.aten


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
