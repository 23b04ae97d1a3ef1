"""Cut a rank's ``micro`` graph by depth: every node gets a stage and one of three passes.

A *border* lies in front of a repeated block. Forward nodes belong to the stage of their block; those outside of blocks
to the stage that reads them first. Backward nodes belong to the stage of their block too, those outside to
the last that they may. What depends on no activation, on the batch alone or on weights alone, belongs to nobody and is
made where it is read: rotary tables and masks are computed again rather than sent.

The backward pass of a stage falls into two: the gradient of its input, for which the stage before waits, and that of
its weights (Qi et al. 2023).
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from meshwright.compiler.analysis.blocks import region_of
from meshwright.compiler.diagnostics import error
from meshwright.compiler.graph.meeting import meets
from meshwright.compiler.graph.program import StepProgram, Value, annotation
from meshwright.compiler.plan import Pipeline
from meshwright.compiler.schedules.catalogue import virtual as made_for
from meshwright.compiler.schedules.catalogue import why_not
from meshwright.compiler.schedules.request import Request


@dataclass
class Assigned:
    """Where nodes are computed. Nodes that are in neither belong to nobody."""

    stages: int
    of: dict[fx.Node, tuple[int, Any]] = field(default_factory=dict)
    """The stage, and its pass (of ``update``: its round)."""
    rounds: int = 1
    """Of ``update``: how many there are."""
    weights: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """By parameter, the stages that read it."""
    again: set[fx.Node] = field(default_factory=set)
    """What every pass makes for itself: what is made of weights alone (casts, gathers), for to keep it would be to hold
    the weights once more for every microbatch on its way; and numbers that are no tensors (where a shard begins)."""


def block_order(graph: fx.Graph) -> list[str]:
    """The outermost repeated blocks, in the order of the forward pass."""
    found: dict[str, None] = {}
    for node in graph.nodes:
        label = annotation(node).block
        if label and annotation(node).phase == "forward" and not annotation(node).recomputed:
            block = region_of(label, 1)
            if block.rpartition(".")[2].isdecimal():
                found[block] = None
    return list(found)


def even_cuts(order: Sequence[str], stages: int) -> tuple[str, ...]:
    """The blocks that the stages after the first begin with, where all have as many, the first ones one less if they
    do not come out even."""
    return tuple(order[i * len(order) // stages] for i in range(1, stages))


def pipeline_of(program: StepProgram, ranks: int, schedule: str, virtual: int) -> Pipeline:
    """A pipeline of stages with as many blocks each. Raises MeshwrightError E0502 if there are too few."""
    order, stages = block_order(program.micro.module.graph), ranks * virtual
    if len(order) < stages:
        of_each = f" of which each of {ranks} ranks has {virtual}" if virtual > 1 else ""
        message = f"{stages} stages{of_each} cannot be made of {len(order) or 'no'} repeated blocks"
        raise error("E0502", message, action=_fewer(len(order), ranks, schedule, virtual))
    return Pipeline(even_cuts(order, stages), schedule)


def _fewer(blocks: int, ranks: int, schedule: str, virtual: int) -> str:
    """What to ask for instead of more stages than there are blocks."""

    def legal(name: str, each: int) -> list[int]:
        degrees = range(2, min(ranks, blocks // each) + 1)
        return [n for n in degrees if not why_not(name, Request(n, n, each))]

    if found := legal(schedule, virtual):
        dividing = [n for n in found if ranks % n == 0]
        other = f", or pp={dividing[-1]}, which divides {ranks}" if dividing and dividing[-1] != found[-1] else ""
        return f"use at most pp={found[-1]}{other}"
    fewer = blocks // ranks
    if fewer and not why_not(schedule, Request(ranks, ranks, fewer)):
        return f"use at most virtual={fewer}"
    if found := legal(schedule, made_for(schedule)):
        return f"leave virtual out, and use at most pp={found[-1]}"
    return f"use at most pp={min(ranks, blocks)}, with schedule=1f1b" if blocks > 1 else "leave pp out"


def assign(
    graph: fx.Graph, roles: Mapping[fx.Node, Value], first_blocks: Sequence[str], *, apart: bool = True
) -> Assigned:
    """Give every node its stage and pass. ``first_blocks``: the blocks that stages after the first begin with.

    Unless gradients of weights are computed ``apart``, all of the backward pass is in ``I``, in the order of the graph,
    so that nothing is kept for them longer than from one op to the next.
    """
    order = block_order(graph)
    starts = [order.index(block) for block in first_blocks]
    stage_of = {block: sum(start <= i for start in starts) for i, block in enumerate(order)}
    found = Assigned(len(first_blocks) + 1)
    free, found.again = _free(graph, roles)
    stage: dict[fx.Node, int] = {}
    nodes = [n for n in graph.nodes if n.op == "call_function" and n not in free]
    region = {n: region_of(annotation(n).block, 1) for n in nodes}
    for node in (n for n in nodes if annotation(n).phase == "forward"):
        least = max((stage[n] for n in node.all_input_nodes if n in stage), default=0)
        stage[node] = max(least, stage_of.get(region[node], 0))
    # of a block that is used again behind a border, backward nodes do not say of which use they are
    again = {region[n] for n in stage if stage[n] > stage_of.get(region[n], stage[n])}
    _late(graph, stage, stage_of)
    _backward(nodes, stage, stage_of, found.stages - 1, again)
    _apart(graph, stage, found)
    if not apart:
        found.of = {node: (number, "I" if kind == "W" else kind) for node, (number, kind) in found.of.items()}
    for node in graph.nodes:
        if node.target is operator.getitem and node.args[0] in found.of:
            # results of one op are taken apart where they are made: only what is read is kept or sent
            found.of[node] = found.of[node.args[0]]
    for node, value in roles.items():
        if value.kind == "parameter":
            found.weights[value.name] = tuple(sorted({s for n in _readers(node, free) for s in [stage[n]]}))
    return found


def _backward(
    nodes: Sequence[fx.Node],
    stage: dict[fx.Node, int],
    stage_of: Mapping[str, int],
    last: int,
    again: Collection[str],
) -> None:
    """Give backward nodes their stages, those of forward nodes being settled. What is made of forward values alone
    stands where a gradient first meets it, so that one gradient goes on to the stage before, and not its summands."""
    loose: dict[fx.Node, None] = {}
    backward = [n for n in nodes if annotation(n).phase != "forward"]
    used = dict(_stages_of_uses(backward, stage, again))
    for node in backward:
        region = region_of(annotation(node).block, 1)
        own = None if region in again else stage_of.get(region)
        before = [n for n in node.all_input_nodes if n in stage]
        later = [stage[n] for n in before if annotation(n).phase == "backward" and n not in loose]
        if own is None and not later:
            loose[node] = None
        most = min(later, default=max((stage[n] for n in before), default=last))
        stage[node] = min(most, used.get(node, most)) if own is None else own
    for node in reversed(loose):
        stage[node] = max([stage[node], *(stage[u] for u in node.users if u in stage)])


def _stages_of_uses(
    backward: Sequence[fx.Node], stage: Mapping[fx.Node, int], again: Collection[str]
) -> Iterator[tuple[fx.Node, int]]:
    """Of blocks that are used again, the stage of the use that a backward node belongs to: that of the values
    that the block has made forward and it reads, or the next node of the block does."""
    region, there = "", -1
    for node in reversed(backward):
        own = region_of(annotation(node).block, 1)
        kept = (n for n in node.all_input_nodes if n in stage and annotation(n).phase == "forward")
        read = [stage[n] for n in kept if region_of(annotation(n).block, 1) == own]
        region, there = own, max(read, default=there if own == region else -1)
        if own in again and there >= 0:
            yield node, there


def _late(graph: fx.Graph, stage: dict[fx.Node, int], stage_of: Mapping[str, int]) -> None:
    """Let forward nodes outside of blocks stand where they are first read: the embedding of a decoder is not made by
    the first stage of the encoder."""
    for node in reversed(list(graph.nodes)):
        outside = region_of(annotation(node).block, 1) not in stage_of
        if outside and node in stage and annotation(node).phase == "forward":
            readers = [stage[u] for u in node.users if u in stage and annotation(u).phase == "forward"]
            stage[node] = max(stage[node], min(readers, default=stage[node]))


def _free(graph: fx.Graph, roles: Mapping[fx.Node, Value]) -> tuple[set[fx.Node], set[fx.Node]]:
    """What is computed from the batch alone, or from weights alone; and apart what each pass makes for itself."""
    weights: dict[fx.Node, bool] = {}
    free: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op == "placeholder":
            free.add(node)
            weights[node] = roles[node].kind == "parameter"
        elif node.op != "call_function" or meets(node) or any(map(meets, node.users)):
            continue  # where microbatches meet, and what they meet with, is in a pass of its own
        elif all(n in free for n in node.all_input_nodes):
            kinds = {weights[n] for n in node.all_input_nodes}
            if len(kinds) < 2:
                free.add(node)
                weights[node] = kinds == {True}
    numbers = {node for node in free if isinstance(node.meta.get("val"), int)}
    return free, numbers | {node for node, alone in weights.items() if alone and node.op == "call_function"}


def _readers(node: fx.Node, free: set[fx.Node]) -> Iterable[fx.Node]:
    """The nodes of stages that read a value, or what is made of it alone."""
    for user in node.users:
        if user in free:
            yield from _readers(user, free)
        elif user.op == "call_function":
            yield user


def _apart(graph: fx.Graph, stage: Mapping[fx.Node, int], found: Assigned) -> None:
    """Which backward nodes a gradient that goes on to another block needs."""
    needed: set[fx.Node] = set()
    for node in reversed(list(graph.nodes)):
        if node not in stage or annotation(node).phase == "forward":
            continue
        region = region_of(annotation(node).block, 1)
        for user in node.users:
            if user not in stage:
                continue
            if user in needed or region_of(annotation(user).block, 1) != region or stage[user] != stage[node]:
                needed.add(node)
    for node, number in stage.items():
        if annotation(node).phase == "forward":
            found.of[node] = number, "F"
        else:
            found.of[node] = number, "I" if node in needed else "W"
