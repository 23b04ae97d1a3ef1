"""Read off a rank program what its passes do, where each part of it belongs, and what goes across borders: all that is
needed to price any cut of it into stages.

The program is taken apart as :mod:`meshwright.compiler.passes.pipeline` does it, but with all blocks in one stage; a
stage does the part of its blocks. Where things belong that stand in no block is found by giving every block a stage.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import fx

from meshwright.compiler.analysis.held import accumulators, held_values
from meshwright.compiler.analysis.inplace import in_place
from meshwright.compiler.analysis.kernels import Known
from meshwright.compiler.analysis.kinds import INPUT_KINDS, storage_kinds
from meshwright.compiler.analysis.level import region_of
from meshwright.compiler.analysis.lifetimes import deposited, nodes_of, roles
from meshwright.compiler.analysis.storage import Storage, storages, tensor_bytes
from meshwright.compiler.analysis.summarize import model_flops, summarize_graph
from meshwright.compiler.analysis.waiting import with_waiting
from meshwright.compiler.graph.program import Value, annotation
from meshwright.compiler.graph.rank_program import LocalGraph, RankProgram
from meshwright.compiler.mesh import Mesh
from meshwright.compiler.summary import (
    EVERYWHERE,
    PASSES,
    Border,
    GraphSummary,
    Held,
    Kept,
    Meeting,
    Pass,
    StagedSummary,
)

_META = "stage of"
Place = tuple[str, str]
"""A block and, of what stands in none, its home."""


@dataclass(frozen=True)
class Taken:
    """A rank program that was taken apart.

    ``homes`` has for every node that belongs to a stage if every block is one the number of that block, ``reading`` the
    same for parameters; ``passes`` are the finished graphs of all blocks, ``origins`` by pass and value that comes in
    the pass that makes it, ``update`` the finished update.
    """

    whole: RankProgram
    """With raw graphs."""
    blocks: Sequence[str]
    homes: Mapping[fx.Node, int]
    reading: Mapping[str, Sequence[int]]
    passes: Mapping[Pass, LocalGraph]
    origins: Mapping[Pass, Mapping[str, Pass]]
    update: LocalGraph
    meetings: Mapping[str, Meeting]
    """By block, how often microbatches meet on the way through it."""
    rounds: Mapping[str, int]
    """By node after a meeting: how many meetings of its pass come before it."""


def mark(blocks: Sequence[str], graph: fx.Graph, homes: Mapping[fx.Node, int]) -> None:
    """Note down at every node where it belongs; copies of the graph keep it."""
    places: dict[fx.Node, str] = {}
    for node in reversed(list(graph.nodes)):
        if node.op == "call_function":
            places[node] = _place(node, blocks, homes, places)
            node.meta[_META] = places[node]


def _place(node: fx.Node, blocks: Sequence[str], homes: Mapping[fx.Node, int], places: Mapping[fx.Node, str]) -> str:
    """The home of a node; empty for one that belongs to the block that it is labelled with."""
    region = region_of(annotation(node).block, 1)
    if node in homes:
        return "" if region in blocks else blocks[homes[node]]
    readers = {places[u] or region_of(annotation(u).block, 1) for u in node.users if u in places}
    if len(readers) == 1:
        (only,) = readers
        return "" if only == region else only
    return EVERYWHERE if readers or region not in blocks else ""


def summarize_stages(taken: Taken, groups: Iterable[tuple[str, str]], repeats: Mapping[str, int]) -> StagedSummary:
    """The summary of a program that was taken apart. ``groups``: of blocks that repeat, the first copy and the one that
    stands for all further ones; ``repeats``: by block, how many equal ones it stands for."""
    whole = taken.whole
    known: Known = {}
    mesh = whole.mesh.with_micro(whole.plan.microbatches)
    program = whole.program
    passes: dict[Pass, GraphSummary] = {}
    for kind in PASSES:
        graph = taken.passes[kind]
        memory = storages(nodes_of(graph), mesh)
        found = summarize_graph(graph, mesh, known, memory, passed_on=deposited(graph).values())
        passes[kind] = with_waiting(_placed(found, graph, taken.blocks), graph, whole.plan.microbatches, taken.rounds)
    update = summarize_graph(taken.update, mesh, known, update=in_place(taken.update))
    integers = [math.prod(s.shape) for s in program.batch.values() if not s.dtype.is_floating_point]
    return StagedSummary(
        mesh=whole.mesh,
        microbatches=whole.plan.microbatches,
        prologue=summarize_graph(whole.prologue, mesh, known),
        passes=passes,
        update=_placed(update, taken.update, taken.blocks),
        blocks=tuple(taken.blocks),
        groups=tuple(groups),
        held=tuple(_held(replace(whole, update=taken.update), taken)),
        kept=tuple(_kept(taken, mesh)),
        borders=_borders(taken),
        repeats=dict(repeats),
        model_flops=model_flops(program, repeats, known),
        samples=program.batch_size,
        tokens=max(integers, default=0),
        meetings=taken.meetings,
    )


def _where(node: fx.Node, blocks: Sequence[str]) -> Place:
    """The place of a node of a finished graph; what joins messages belongs to what it was made for."""
    block = annotation(node).block
    inside = region_of(block, 1) in blocks
    home = node.meta.get(_META)
    if home is None and not inside:
        found = {_where(user, blocks) for user in node.users if user.op == "call_function"}
        return found.pop() if len(found) == 1 else ("", EVERYWHERE)
    return ("", home) if home else (block, "")


def _placed(found: GraphSummary, graph: LocalGraph, blocks: Sequence[str]) -> GraphSummary:
    """The summary with homes, without the values that other passes have left: they are counted for themselves."""
    nodes = {n.name: n for n in graph.module.graph.nodes}
    places = {name: _where(node, blocks) for name, node in nodes.items() if node.op == "call_function"}
    inputs = {n.name: v for n, v in roles(graph)[0].items()}
    items = tuple(replace(i, block=b, home=h) for i in found.items for b, h in [places[i.name]])
    buffers = []
    for buffer in found.buffers:
        value = inputs.get(buffer.name)
        if value is not None and value.kind == "value":
            continue
        if value is not None:
            inside = region_of(buffer.block, 1) in blocks
            buffers.append(replace(buffer, block=buffer.block if inside else "", home="" if inside else EVERYWHERE))
        else:
            block, home = places[buffer.name]
            buffers.append(replace(buffer, block=block, home=home))
    return replace(found, items=items, buffers=tuple(buffers))


def _held(whole: RankProgram, taken: Taken) -> Iterator[Held]:
    """Parameters, state, buffers and constants, and gradient accumulators where there are several microbatches."""
    for value, size in held_values(whole).items():
        owner = value.name.rpartition("/")[0] if value.kind == "state" else value.name
        for block, home in _owners(owner, value, taken):
            yield Held(size, INPUT_KINDS[value.kind], block, home)
    if whole.plan.microbatches > 1:
        for name, size in accumulators(whole).items():
            for block, home in _owners(name, Value("gradient", name), taken):
                yield Held(size, "gradients", block, home)


def _owners(name: str, value: Value, taken: Taken) -> list[Place]:
    block = next((b for b in taken.blocks if name.startswith(b + ".")), "")
    if block:
        return [(block, "")]
    if value.kind not in ("parameter", "state", "gradient"):
        return [("", EVERYWHERE)]
    # what no stage reads is kept by the first one
    return [("", taken.blocks[stage]) for stage in taken.reading.get(name) or (0,)]


def _kept(taken: Taken, mesh: Mesh) -> Iterator[Kept]:
    """What passes hand on to later ones of the same stage, each piece of memory once."""
    for made in PASSES[:2]:
        graph = taken.passes[made]
        memory = storages(nodes_of(graph), mesh)
        inputs, outputs = roles(graph)
        kinds = storage_kinds(nodes_of(graph), memory.owned, inputs, outputs)
        until: dict[Storage, Pass] = {}
        readers: dict[Storage, dict[Place, None]] = {}
        for later in PASSES[PASSES.index(made) + 1 :]:
            for node, value in roles(taken.passes[later])[0].items():
                if value.kind != "value" or taken.origins[later].get(value.name) != made:
                    continue
                source = outputs[value]
                for storage in memory.owned.get(source, ()):
                    if storage.node in inputs and inputs[storage.node].kind != "batch":
                        continue
                    until[storage] = later
                    places = (_where(user, taken.blocks) for user in node.users if user.op == "call_function")
                    readers.setdefault(storage, {}).update(dict.fromkeys(places))
        for storage, last in until.items():
            own = _where(storage.node, taken.blocks) if storage.node.op == "call_function" else ("", EVERYWHERE)
            shared = own in readers[storage] or own[1] == EVERYWHERE
            block, home = own if shared else next(iter(readers[storage]), own)
            yield Kept(storage.bytes, kinds.get(storage, "activations"), made, last, block, home)


def _borders(taken: Taken) -> dict[str, Border]:
    """What is made on one side of a border and read on the other."""
    bytes_: list[list[int]] = [[0, 0] for _ in taken.blocks]
    for node, stage in taken.homes.items():
        if node.op != "call_function":
            continue
        others = [taken.homes[u] for u in node.users if u in taken.homes]
        size = sum(tensor_bytes(node))
        for border in range(stage + 1, max(others, default=stage) + 1):
            bytes_[border][0] += size
        for border in range(min(others, default=stage) + 1, stage + 1):
            bytes_[border][1] += size
    return {block: Border(*bytes_[i]) for i, block in enumerate(taken.blocks) if i}
