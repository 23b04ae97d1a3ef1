"""Rank programs whose attention is cut along time over an axis ``context``, in the ways that such programs are written
by hand: keys gathered, blocks of keys in a ring, heads exchanged for time; and the labels' border."""

from __future__ import annotations

import operator
import random
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import torch
from torch import fx

from meshwright.compiler.graph import collectives
from meshwright.compiler.graph.pipeline_program import Compiled
from meshwright.compiler.graph.program import Annotation, annotation
from meshwright.compiler.mesh import Mesh, Segment, Sharding
from meshwright.compiler.passes.pipeline import compile_plan
from meshwright.compiler.plan import Plan
from tests.equivalence.editing import calls, done, micro
from tests.parity.harness import Task, captured

aten = torch.ops.aten
RANKS, TIME = 2, 12
PART = TIME // RANKS
AXES = ("context",)
Make = Callable[..., fx.Node]


def whole_program(ranks: int = RANKS) -> Compiled:
    """The step of ``gpt.mw`` that every rank of ``context`` computes whole, to be cut by hand."""
    return compile_plan(captured(Task("gpt.mw")), Plan(mesh=Mesh((("context", ranks),))), verify=False)


@cache
def _whole(shape: tuple[int, ...]) -> Sharding:
    return Sharding.whole(shape)


class Writer:
    """Writes nodes in front of one, annotated with how their values lie."""

    def __init__(self, graph: fx.Graph, before: fx.Node) -> None:
        self.graph, self.before = graph, before

    def call(self, target: Any, *args: Any, shape: tuple[int, ...] | None = None, cut: int | None = None) -> fx.Node:
        """``shape``: the whole one; ``cut``: the dim that ``context`` cuts. Without a shape it is not compared."""
        with self.graph.inserting_before(self.before):
            node = self.graph.call_function(target, args)
        note = Annotation(origin=annotation(self.before).origin)
        if shape is not None:
            note.sharding = Sharding(tuple((Segment(n, AXES if d == cut else ()),) for d, n in enumerate(shape)))
        node.meta = {"meshwright": note}
        return node

    def shard(self, x: fx.Node, dim: int) -> fx.Node:
        shape = annotation(x).shape
        return self.call(collectives.shard, x, dim, AXES, shape=shape, cut=dim)

    def gather(self, x: fx.Node, dim: int, shape: tuple[int, ...]) -> fx.Node:
        return self.call(collectives.all_gather, x, dim, AXES, shape[dim], shape=shape)

    def start(self, part: int = PART) -> fx.Node:
        """Where the rank's part of time begins."""
        return self.call(collectives.offset, (("context", part),))


def attentions(compiled: Compiled) -> Iterator[tuple[Writer, fx.Node, fx.Node]]:
    """Each attention of the forward pass with the node that takes its output, which is to be replaced."""
    graph = micro(compiled)
    for node in calls(graph, "meshwright.attention.default"):
        out = next(u for u in node.users if u.args[1] == 0)
        yield Writer(graph.module.graph, out.next), node, out
    done(graph)


def replace_forward(out: fx.Node, made: fx.Node) -> None:
    """What reads the attention forward reads something else."""
    for user in list(out.users):
        if annotation(user).phase == "forward" and user is not made:
            user.replace_input_with(out, made)


def gathered_keys(
    compiled: Compiled, start: Callable[[Writer], Any] = Writer.start, mask: Callable[[Writer], Any] | None = None
) -> None:
    """Each rank has the queries of its part of time and all keys. ``mask``: one in place of the causal flag."""
    for write, node, out in attentions(compiled):
        query, key, value = node.args[:3]
        part = write.shard(query, 2)
        offsets = [0, 0, start(write), 0]
        masked = mask(write) if mask is not None else None
        form = [masked, None, masked is None, *node.args[6:10], list(node.args[10]), offsets]
        made = write.call(torch.ops.meshwright.attention.default, part, key, value, *form)
        shape = tuple(annotation(out).shape)
        mine = write.call(_first, made, shape=shape, cut=2)
        replace_forward(out, write.gather(mine, 2, shape))


def ring(compiled: Compiled, block_of: Callable[[int], int] = lambda i: i, causal: bool = True) -> None:
    """Keys come block by block, and what each brings is joined by its logsumexp. ``block_of``: which block the rank is
    given where it believes to have block i; ``causal``: whether blocks are masked."""
    for write, node, out in attentions(compiled):
        part = write.shard(node.args[0], 2)
        keys = [write.gather(write.shard(x, 2), 2, tuple(annotation(x).shape)) for x in node.args[1:3]]
        outs, totals = [], []
        for i in range(RANKS):
            first = block_of(i) * PART
            pair = [write.call(aten.slice.Tensor, x, 2, first, first + PART, 1) for x in keys]
            form = [None, None, causal, *node.args[6:10], list(node.args[10]), [0, 0, write.start(), i * PART]]
            made = write.call(torch.ops.meshwright.attention.default, part, *pair, *form)
            outs.append(write.call(_first, made))
            totals.append(write.call(_second, made))
        shape = tuple(annotation(out).shape)
        joined = write.call(_joined, outs, totals, shape=shape, cut=2)
        replace_forward(out, write.gather(joined, 2, shape))


def exchanged_heads(compiled: Compiled, causal: bool = True) -> None:
    """Activations cut along time; attention has all of it for some of the heads."""
    for write, node, out in attentions(compiled):
        given = []
        for x in node.args[:3]:
            shape = tuple(annotation(x).shape)
            mine = write.shard(x, 2)
            given.append(write.call(collectives.all_to_all, mine, 1, 2, "context", TIME, shape=shape, cut=1))
        form = [None, None, causal, *node.args[6:10], list(node.args[10]), [0, 0, 0, 0]]
        made = write.call(torch.ops.meshwright.attention.default, *given, *form)
        shape = tuple(annotation(out).shape)
        heads = write.call(_first, made, shape=shape, cut=1)
        back = write.call(collectives.all_to_all, heads, 2, 1, "context", shape[1], shape=shape, cut=2)
        replace_forward(out, write.gather(back, 2, shape))


def labels_cut(compiled: Compiled, from_neighbour: bool) -> None:
    """Labels shifted within each part of time; the last one of a part is the neighbour's first, or none."""
    graph = micro(compiled)
    node = next(n for n in calls(graph, "aten.constant_pad_nd.default") if annotation(n).phase == "forward")
    write = Writer(graph.module.graph, node.next)
    labels = node.args[0].args[0]
    shape = tuple(annotation(labels).shape)
    mine = write.shard(labels, 1)
    if from_neighbour:
        all_ = write.gather(mine, 1, shape)
        made = write.call(_next_labels, all_, write.start(), PART, shape=shape, cut=1)
    else:
        shifted = write.call(aten.slice.Tensor, mine, 1, 1, PART, 1)
        made = write.call(aten.constant_pad_nd.default, shifted, [0, 1], -100, shape=shape, cut=1)
    whole = write.gather(made, 1, shape)
    replace_forward(node, whole)
    done(graph)


def _first(pair: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return pair[0]


def _second(pair: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return pair[1]


def _joined(outs: list[torch.Tensor], totals: list[torch.Tensor]) -> torch.Tensor:
    total = torch.logsumexp(torch.stack(totals), 0)
    total = total.masked_fill(total == float("-inf"), 0.0)  # of a query that no block has a key for
    made = torch.zeros_like(outs[0])
    for out, own in zip(outs, totals, strict=True):
        made = made + out * torch.exp(own - total).unsqueeze(-1)
    return made


def _next_labels(labels: torch.Tensor, start: int, part: int) -> torch.Tensor:
    padded = torch.nn.functional.pad(labels, [0, 1], value=-100)
    return padded[:, start + 1 : start + 1 + part]


def cut_at_random(compiled: Compiled, dice: random.Random) -> None:
    """Each attention in one of these ways, with a window or without; of most programs offsets, blocks or a mask are
    wrong."""
    wrong = dice.random() < 0.6

    def amiss() -> int:
        return dice.choice([-PART, -3, -1, 0, 0, 0, 1, 3, PART]) if wrong else 0

    for write, node, out in attentions(compiled):
        shape, way, window = (
            tuple(annotation(out).shape),
            dice.choice(["keys", "ring", "heads"]),
            dice.choice([0, 3, 7]),
        )

        def attend(write: Writer, node: fx.Node, *given: Any, begins: Any, window: int = window) -> fx.Node:
            causal = not wrong or dice.random() < 0.8
            form = [None, None, causal, window, *node.args[7:10], list(node.args[10]), [0, 0, *begins]]
            return write.call(torch.ops.meshwright.attention.default, *given, *form)

        def start(write: Writer) -> fx.Node:
            return write.call(operator.add, write.start(), amiss())

        if way == "heads":
            parts = [write.shard(x, 2) for x in node.args[:3]]
            shapes = [tuple(annotation(x).shape) for x in node.args[:3]]
            given = [
                write.call(collectives.all_to_all, x, 1, 2, "context", TIME, shape=s, cut=1)
                for x, s in zip(parts, shapes, strict=True)
            ]
            heads = write.call(_first, attend(write, node, *given, begins=(amiss(), amiss())), shape=shape, cut=1)
            mine = write.call(collectives.all_to_all, heads, 2, 1, "context", shape[1], shape=shape, cut=2)
        elif way == "keys":
            made = attend(write, node, write.shard(node.args[0], 2), *node.args[1:3], begins=(start(write), amiss()))
            mine = write.call(_first, made, shape=shape, cut=2)
        else:
            part, made = write.shard(node.args[0], 2), []
            order = dice.sample(range(RANKS), RANKS) if wrong else range(RANKS)
            for place, block in enumerate(order):
                first = block * PART
                pair = [write.call(aten.slice.Tensor, x, 2, first, first + PART, 1) for x in node.args[1:3]]
                made.append(attend(write, node, part, *pair, begins=(start(write), place * PART + amiss())))
            outs, totals = ([write.call(of, one) for one in made] for of in (_first, _second))
            mine = write.call(_joined, outs, totals, shape=shape, cut=2)
        replace_forward(out, write.gather(mine, 2, shape))
