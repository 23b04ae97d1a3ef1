"""Read the summary of a rank program off its graphs: the last place in the pricing of a plan that knows torch.

What is priced is what is run: every op with its local sizes, every message as the runtime sends it, in the order in
which the executor runs them.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import fx

import meshwright.compiler.graph.ops  # noqa: F401  (registers the ops that are named below)
from meshwright.compiler.analysis.held import accumulator_bytes, held_bytes, released_together
from meshwright.compiler.analysis.inplace import InPlace, in_place
from meshwright.compiler.analysis.kernels import Known, kernel
from meshwright.compiler.analysis.lifetimes import buffers, deposited, nodes_of
from meshwright.compiler.analysis.messages import unpacking
from meshwright.compiler.analysis.storage import Storages, storages, tensor_bytes
from meshwright.compiler.analysis.waiting import waiting
from meshwright.compiler.graph import collectives
from meshwright.compiler.graph.program import StepProgram, annotation
from meshwright.compiler.graph.rank_program import LocalGraph, RankProgram
from meshwright.compiler.mesh import Mesh
from meshwright.compiler.summary import (
    Buffer,
    GraphSummary,
    Item,
    Kernel,
    Message,
    RankSummary,
    Transfer,
    TransferDirection,
    Wait,
)

_TRANSFERS: dict[Any, TransferDirection] = {
    torch.ops.meshwright.to_device.default: "to device",
    torch.ops.meshwright.to_host.default: "to host",
}


def summarize(rank_program: RankProgram, repeats: Mapping[str, int] | None = None) -> RankSummary:
    """The summary of a rank. ``repeats``: by block, how many equal ones it stands for (see :func:`fold`)."""
    repeats = dict(repeats or {})
    plan, mesh = rank_program.plan, rank_program.mesh
    known: Known = {}
    with_micro = mesh.with_micro(plan.microbatches)
    prologue = summarize_graph(rank_program.prologue, with_micro, known)
    added_up = deposited(rank_program.micro).values() if plan.microbatches > 1 else ()
    memory = storages(nodes_of(rank_program.micro), with_micro)
    micro = summarize_graph(rank_program.micro, with_micro, known, memory, passed_on=added_up)
    update = summarize_graph(rank_program.update, with_micro, known, update=in_place(rank_program.update))
    update = replace(update, buffers=released_together(rank_program, memory, update.buffers))
    # what the prologue returns is there for every microbatch
    end = len(prologue.items)
    passed_on = [
        replace(b, kind="batch", born=-1, last=len(micro.items), block="")
        for b in prologue.buffers
        if 0 <= b.born < b.last == end
    ]
    others = waiting(rank_program.micro, micro, plan.microbatches, repeats)
    micro = replace(micro, buffers=(*passed_on, *micro.buffers, *others))
    program = rank_program.program
    integers = [math.prod(s.shape) for s in program.batch.values() if not s.dtype.is_floating_point]
    return RankSummary(
        mesh=mesh,
        microbatches=plan.microbatches,
        prologue=prologue,
        micro=micro,
        update=update,
        held=held_bytes(rank_program, repeats),
        accumulators=accumulator_bytes(rank_program, repeats) if plan.microbatches > 1 else 0,
        repeats=repeats,
        model_flops=model_flops(program, repeats, known),
        samples=program.batch_size,
        tokens=max(integers, default=0),
    )


def summarize_graph(
    graph: LocalGraph,
    mesh: Mesh,
    known: Known | None = None,
    memory: Storages | None = None,
    update: InPlace | None = None,
    passed_on: Collection[fx.Node] = (),
) -> GraphSummary:
    """The items and buffers of one graph. The mesh has the axis ``micro``; ``known`` keeps the kernels of equal
    calls; ``memory`` is where values lie, if that is known; ``update`` says how an update is run; ``passed_on`` are
    outputs that are taken away as soon as they are made.
    """
    known = {} if known is None else known
    order = update.order if update else nodes_of(graph)
    memory = memory or storages(order, mesh, update.reused if update else frozenset())
    items: list[Item] = []
    places: dict[fx.Node, tuple[int, int]] = {}  # the first and the last item of each node; (-1, -1): an input
    begun: dict[fx.Node, list[int]] = {}
    passing: list[Buffer] = []  # what lives within a node only
    for node in order:
        if node.op != "call_function" or node.target is collectives.offset:
            places[node] = (-1, -1)
            continue
        first = len(items)
        sources = [n for n in node.all_input_nodes if n in places]
        reads = tuple([places[n][1] for n in sources])
        sizes = tuple([memory.bytes_of(n) for n in sources])
        note = annotation(node)
        done = _Done(node, mesh, known, memory, begun)
        for work in done.works:
            # copies and messages of one op come one after the other, but messages under way do not wait for each other
            follows = len(items) > first and not (isinstance(before := items[-1].work, Message) and before.asynchronous)
            at = ((len(items) - 1,), (0,)) if follows else (reads, sizes)
            items.append(Item(node.name, note.phase, note.block, work, *at, note.recomputed))
            if isinstance(work, Message) and work.asynchronous:
                begun.setdefault(node, []).append(len(items) - 1)
        places[node] = (first, len(items) - 1)
        for size, since in done.carried:
            born = min(first + since, len(items) - 1)
            passing.append(Buffer(size, done.kind, born, len(items) - 1, note.phase, note.block, node.name))
    found = (*buffers(graph, order, memory, places, len(items), update, passed_on), *passing)
    return GraphSummary(tuple(items), found)


class _Done:
    """What the device does for a node: at least one work, so that it has a place."""

    def __init__(
        self,
        node: fx.Node,
        mesh: Mesh,
        known: Known,
        memory: Storages,
        begun: Mapping[fx.Node, list[int]],
    ) -> None:
        self.works: list[Kernel | Message | Wait | Transfer] = []
        self.carried: list[tuple[int, int]] = []
        """Bytes of memory that only the node needs, and before which of its works it is taken."""
        self.kind = "communication buffers"
        if node.target is collectives.wait:
            (begin,) = node.all_input_nodes
            self.works += [Wait(at) for at in begun.get(begin, ())]
            unpacked = unpacking(begin, mesh)
            self.carried += [(size, since + len(self.works)) for size, since in unpacked.carried]
            self.works += unpacked.works
        elif node.target in _TRANSFERS:
            self.works.append(Transfer(_TRANSFERS[node.target], sum(tensor_bytes(node))))
        elif node in memory.sent:
            sent = memory.sent[node]
            self.works += sent.works
            self.carried += () if sent.asynchronous else sent.carried
        else:
            work, taken = kernel(node, known)
            self.works.append(work)
            self.carried += [(taken, 0)] if taken else []
            self.kind = "workspace"
        if not self.works:
            self.works.append(Kernel(getattr(node.target, "__name__", ""), "view", 0.0, 0, 0))


def model_flops(program: StepProgram, repeats: Mapping[str, int], known: Known | None = None) -> float:
    """The floating point operations of matrix products and attention over the whole global batch, as captured."""
    known = {} if known is None else known
    total = 0.0
    for node in program.micro.module.graph.nodes:
        if node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload):
            found, _ = kernel(node, known)
            if found.kind in ("matmul", "attention"):
                total += found.flops * repeats.get(annotation(node).block, 1)
    return total
