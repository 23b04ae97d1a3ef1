"""How much memory a rank needs in one step, by kind, and when it needs most.

Counted as the executor runs the program: parameters, optimizer state, buffers and constants are
held throughout; a microbatch's inputs as long as it runs; gradients are added up in accumulators
when there are several microbatches; the update finishes one parameter after the other and writes in place.
Work space inside ops and the allocator's reserve are not counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import fx

from meshwright.compiler.analysis.kinds import INPUT_KINDS, KINDS, storage_kinds
from meshwright.compiler.analysis.storage import Storage, last_reads, storages
from meshwright.compiler.graph.program import Value, annotation
from meshwright.compiler.graph.rank_program import LocalGraph, RankProgram

_HELD = ("parameter", "state", "buffer", "constant")
_REDUCE = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2}


@dataclass(frozen=True)
class Moment:
    """A point in a step: the node that is being computed."""

    graph: str
    node: str
    phase: str = ""
    block: str = ""


@dataclass(frozen=True)
class Memory:
    """Bytes on every rank (all ranks hold the same sizes, padding included)."""

    peak: int
    at: Moment
    by_kind: Mapping[str, int]
    """What the peak consists of."""
    most: Mapping[str, int]
    """The most that each kind comes to at any moment."""
    by_graph: Mapping[str, int]
    """The peak within each graph."""


@dataclass
class _Meter:
    """Keeps the peak while the graphs are walked through."""

    peak: int = -1
    at: Moment = field(default_factory=lambda: Moment("", ""))
    by_kind: dict[str, int] = field(default_factory=dict)
    most: Counter[str] = field(default_factory=Counter)
    by_graph: Counter[str] = field(default_factory=Counter)

    def measure(self, live: Counter[str], moment: Moment) -> None:
        total = live.total()
        self.by_graph[moment.graph] = max(self.by_graph[moment.graph], total)
        self.most |= live
        if total > self.peak:
            self.peak, self.at, self.by_kind = total, moment, {k: live[k] for k in KINDS if live[k]}


def memory(rank_program: RankProgram) -> Memory:
    """The memory of a rank over one step."""
    meter = _Meter()
    held = _held(rank_program)
    prologue, micro, update = rank_program.prologue, rank_program.micro, rank_program.update
    _walk(prologue, "prologue", _nodes(prologue), held, meter, keep=lambda value: True)
    during = held + Counter({"batch": _results(prologue)})
    if rank_program.plan.microbatches > 1:
        during["gradients"] += _accumulators(rank_program)
    _walk(micro, "micro", _nodes(micro), during, meter, keep=lambda value: True)
    _walk(update, "update", in_turn(update), held, meter, keep=lambda value: value.kind not in ("parameter", "state"))
    most = {k: meter.most[k] for k in KINDS if meter.most[k]}
    return Memory(meter.peak, meter.at, meter.by_kind, most, dict(meter.by_graph))


def in_turn(graph: LocalGraph) -> list[fx.Node]:
    """The nodes of ``update`` in the order that finishes one parameter, with its state, after the other."""
    nodes = _nodes(graph)
    inputs = [n for n in nodes if n.op == "placeholder"]
    outputs = _roles(graph)[1]
    mutable = [v for v in outputs if v.kind in ("parameter", "state")]
    turns: dict[str, list[Value]] = {}
    for value in sorted(mutable, key=lambda v: v.kind, reverse=True):
        turns.setdefault(value.name.partition("/")[0], []).append(value)
    goals = [v for v in outputs if v not in mutable] + [v for group in turns.values() for v in group]
    done = dict.fromkeys(inputs)
    for goal in goals:
        stack = [outputs[goal]]
        while stack:
            node = stack[-1]
            missing = [n for n in node.all_input_nodes if n not in done]
            if node in done or not missing:
                done.setdefault(stack.pop())
            else:
                stack.extend(reversed(missing))
    return list(done)


def _walk(
    graph: LocalGraph,
    name: str,
    order: list[fx.Node],
    held: Counter[str],
    meter: _Meter,
    keep: Callable[[Value], bool],
) -> None:
    """Go through a graph and measure what lives at every node. ``keep`` says which outputs live to the end."""
    inputs, outputs = _roles(graph)
    owned = storages(order)
    last = last_reads(order, owned)
    for value, node in outputs.items():
        for storage in owned.get(node, ()) if keep(value) else ():
            last[storage] = len(order)
    kind = storage_kinds(order, owned, inputs, outputs)
    # the caller holds the inputs of prologue and micro; update's are released one by one
    for node, value in inputs.items():
        for storage in owned[node]:
            if name != "update" or value.kind != "gradient":
                last[storage] = len(order)
    live = Counter(held)
    freed: dict[int, list[Storage]] = {}
    for storage, position in last.items():
        freed.setdefault(position, []).append(storage)
    # prologue values are passed on to micro as they are, so they are counted as what prologue returned
    elsewhere = (*_HELD, "prologue")
    counted = {s for n, v in inputs.items() if v.kind in elsewhere for s in owned[n]}
    for node, value in inputs.items():
        live.update({kind[s]: s.bytes for s in owned[node] if value.kind not in elsewhere})
    for position, node in enumerate(order):
        if node.op != "placeholder":
            live.update(_sizes((s for s in owned[node] if s.node is node), kind))
        note = annotation(node)
        meter.measure(live, Moment(name, node.name, note.phase, note.block))
        live.subtract(_sizes((s for s in freed.get(position, ()) if s not in counted), kind))


def _sizes(found: Iterable[Storage], kind: Mapping[Storage, str]) -> Counter[str]:
    sizes: Counter[str] = Counter()
    for storage in found:
        sizes[kind[storage]] += storage.bytes
    return sizes


def _held(rank_program: RankProgram) -> Counter[str]:
    """What a rank holds throughout; each tensor once, however many graphs read it."""
    seen: dict[Value, int] = {}
    for graph in (rank_program.prologue, rank_program.micro, rank_program.update):
        inputs, _ = _roles(graph)
        owned = storages(inputs)
        for node, value in inputs.items():
            if value.kind in _HELD:
                seen[value] = max(seen.get(value, 0), sum(s.bytes for s in owned[node]))
    held: Counter[str] = Counter()
    for value, size in seen.items():
        held[INPUT_KINDS[value.kind]] += size
    return held


def _accumulators(rank_program: RankProgram) -> int:
    """The bytes of the gradient accumulators, in the dtype of reduction or a wider one."""
    least = _REDUCE[rank_program.plan.precision.reduce]
    total = 0
    for value, node in _roles(rank_program.micro)[1].items():
        if value.kind == "gradient" and (dtype := annotation(node).dtype):
            total += int(torch.Size(annotation(node).shape).numel()) * max(least, dtype.itemsize)
    return total


def _results(graph: LocalGraph) -> int:
    """The bytes of all outputs of a graph."""
    owned = storages(_nodes(graph))
    return sum(s.bytes for s in {s for n in _roles(graph)[1].values() for s in owned[n]})


def _nodes(graph: LocalGraph) -> list[fx.Node]:
    return [n for n in graph.module.graph.nodes if n.op != "output"]


def _roles(graph: LocalGraph) -> tuple[dict[fx.Node, Value], dict[Value, fx.Node]]:
    """The roles of inputs, and the nodes of outputs (without those that are None)."""
    nodes = list(graph.module.graph.nodes)
    inputs = dict(zip((n for n in nodes if n.op == "placeholder"), graph.signature.inputs, strict=True))
    outputs = zip(graph.signature.outputs, nodes[-1].args[0], strict=True)
    return inputs, {value: node for value, node in outputs if isinstance(node, fx.Node)}
