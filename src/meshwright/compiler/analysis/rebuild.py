"""The step without the regions that a :class:`Removal` takes out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from meshwright.compiler.analysis.likeness import site_of
from meshwright.compiler.analysis.regions import is_total
from meshwright.compiler.analysis.removal import Removal, Unsafe
from meshwright.compiler.graph.adapter import graph_module
from meshwright.compiler.graph.program import Graph, Signature, StepProgram, Value, annotation


def without_regions(program: StepProgram, micro: Removal, update: Removal) -> StepProgram:
    """The step without the regions of the removals. Raises Unsafe where what stays needs what goes."""
    gone = {p.name for p in program.parameters if _inside(p.name, micro.removed)}

    def stays(value: Value) -> bool:
        owner = value.name.rpartition("/")[0] if value.kind == "state" else value.name
        if value.kind in ("parameter", "gradient", "state"):
            return owner not in gone
        return value.kind != "buffer" or not _inside(value.name, micro.removed)

    new_micro = _graph(micro, [v for v in micro.regions.graph.signature.outputs if stays(v)])
    new_update = _graph(update, [v for v in update.regions.graph.signature.outputs if stays(v)])
    for graph, removal in ((new_micro, micro), (new_update, update)):
        for value, node in graph.placeholders().items():
            if not stays(value):
                region = next(r for r in removal.removed if value.name.startswith(r + "."))
                raise Unsafe(region, f"{node.name} is needed by what stays when its block is taken out")
    _renumber(new_micro)
    read = {v.name for v in new_micro.signature.inputs if v.kind == "prologue"}
    prologue = _pruned(program.prologue, [v for v in program.prologue.signature.outputs if v.name in read])
    inputs = {v for g in (prologue, new_micro, new_update) for v in g.signature.inputs}
    state = {n: s for n, s in program.state.items() if stays(Value("state", n))}
    return replace(
        program,
        prologue=prologue,
        micro=new_micro,
        update=new_update,
        parameters=tuple(p for p in program.parameters if p.name not in gone),
        buffers={n: s for n, s in program.buffers.items() if not _inside(n, micro.removed)},
        state=state,
        state_init={n: v for n, v in program.state_init.items() if n in state},
        constants={n: t for n, t in program.constants.items() if Value("constant", n) in inputs},
    )


def _inside(name: str, regions: Iterable[str]) -> bool:
    parts = name.split(".")
    return any(".".join(parts[:i]) in regions for i in range(1, len(parts)))


def _graph(removal: Removal, outputs: Sequence[Value]) -> Graph:
    """The graph that makes the given outputs, and nothing that they do not need."""
    old = removal.regions.graph
    results = old.outputs()
    needed: set[fx.Node] = set()
    made: dict[Value, Any] = {
        v: removal.read(results[v]) if isinstance(results[v], fx.Node) else results[v] for v in outputs
    }
    pending = [n for n in made.values() if isinstance(n, fx.Node)]
    while pending:
        node = pending.pop()
        if node not in needed:
            needed.add(node)
            pending.extend(removal.terms(node) if is_total(node) else map(removal.read, node.all_input_nodes))
    new = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in old.module.graph.nodes:
        if node not in needed:
            continue
        if is_total(node):
            copy = new.create_node(node.op, node.target, ([copies[t] for t in removal.terms(node)],), name=node.name)
            copy.meta = dict(node.meta)
        else:
            copy = new.node_copy(node, lambda n: copies[removal.read(n)])
        note = annotation(node)
        # what a block has made for all of them stays without the block
        copy.meta["meshwright"] = replace(note, block="" if _inside(f"{note.block}.", removal.removed) else note.block)
        copies[node] = copy
    new.output(tuple(copies[n] if isinstance(n, fx.Node) else n for n in made.values()))
    new.lint()
    inputs = tuple(v for v, n in old.placeholders().items() if n in copies)
    return Graph(graph_module(torch.nn.Module(), new), Signature(inputs, tuple(made)))


def _pruned(graph: Graph, outputs: Sequence[Value]) -> Graph:
    """The graph that makes fewer outputs."""
    from meshwright.compiler.analysis.regions import find_regions

    return _graph(Removal(find_regions(graph, lambda node: ""), frozenset()), outputs)


def _renumber(graph: Graph) -> None:
    """Number the draws of random numbers as capture does: from 0, in order."""
    drawing = [(node, at) for node in graph.module.graph.nodes if (at := site_of(node)) is not None]
    number = {site: i for i, site in enumerate(sorted({node.args[at] for node, at in drawing}))}
    for node, at in drawing:
        node.args = (*node.args[:at], number[node.args[at]], *node.args[at + 1 :])
