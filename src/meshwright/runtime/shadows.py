"""All ranks of a compiled step, forward, on values with shadows: what each value of each rank depends on.

The ranks are those of the virtual cluster. One computes at a time, and the shadows of all are in one memory, so a
collective needs no rule: whoever moves or adds the tensors of a group moves or joins what they depend on.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, fx

from meshwright.compiler.causality.interpreter import Interpreter, Notes
from meshwright.compiler.causality.listings import Listings
from meshwright.compiler.causality.memory import Memory
from meshwright.compiler.causality.shadow import Shadow, constant
from meshwright.compiler.graph import collectives
from meshwright.compiler.graph.forward_pieces import Piece, forward_pieces
from meshwright.compiler.graph.meeting import meets
from meshwright.compiler.graph.pipeline_program import Compiled, PipelineProgram
from meshwright.compiler.graph.program import Signature, Value, annotation
from meshwright.compiler.graph.rank_program import LocalGraph
from meshwright.compiler.mesh import Mesh, Sharding
from meshwright.compiler.plan import PIPE
from meshwright.compiler.schedules.table import Action
from meshwright.runtime.feed import whole_batch
from meshwright.runtime.layout import positions
from meshwright.runtime.materialize import Weights
from meshwright.runtime.one_at_a_time import OneAtATime
from meshwright.runtime.rendezvous import Rendezvous
from meshwright.runtime.rounds import met
from meshwright.runtime.step_executor import StepExecutor
from meshwright.runtime.virtual import VirtualCluster


def without_update(compiled: Compiled) -> Compiled:
    """The same with nothing to do at the end of a step, which would have to be prepared for every rank."""
    if isinstance(compiled, PipelineProgram):
        return replace(compiled, stages=tuple(replace(stage, update=()) for stage in compiled.stages))
    graph = fx.Graph()
    graph.output(())
    module = fx.GraphModule(torch.nn.Module(), graph)
    return replace(compiled, update=LocalGraph(module, Signature((), ()), {}, {}))


@dataclass(frozen=True)
class Seen:
    """What a node's value depends on, on one rank in one microbatch. ``deps`` ``[*local shape, words]``."""

    at: Mapping[str, int]
    """The rank's coordinates, with ``micro``."""
    deps: Tensor
    sharding: Sharding


@dataclass
class Found:
    """By node, of all ranks and microbatches. ``notes``: what the run met besides."""

    mesh: Mesh
    """With the axis ``micro``."""
    seen: dict[fx.Node, list[Seen]] = field(default_factory=dict)
    notes: Notes = field(default_factory=Notes)

    def whole(self, node: fx.Node) -> list[Tensor]:
        """``[*whole shape, words]`` for each copy that ranks hold of a node's value, sums that they owe joined."""
        made: dict[tuple[tuple[str, int], ...], Tensor] = {}
        for one in self.seen.get(node, ()):
            used = one.sharding.axes | one.sharding.owed
            # of what goes two ways through a pipeline, either way has its microbatches
            copy = tuple((axis, n) for axis, n in one.at.items() if axis not in used and axis != PIPE)
            if copy not in made:
                made[copy] = torch.zeros((*one.sharding.shape, one.deps.shape[-1]), dtype=torch.int64)
            index = [positions(dim, self.mesh, one.at) for dim in one.sharding.dims]
            deps = one.deps
            for d, places in enumerate(index):
                deps = deps.index_select(d, (places >= 0).nonzero().flatten())
            grid = torch.meshgrid(*(p[p >= 0] for p in index), indexing="ij") if index else ()
            made[copy][grid] |= deps
        return list(made.values())


class ShadowCluster(VirtualCluster):
    """The virtual cluster, one rank at a time."""

    meeting: OneAtATime

    def _meet(self) -> Rendezvous:
        self.meeting = OneAtATime(self.mesh.ranks)
        return self.meeting


def read_forward(
    compiled: Compiled,
    weights: Weights,
    batch: Mapping[str, Tensor],
    shadows: Mapping[str, Shadow],
    free: range,
    roots: Collection[str],
    known_buffers: bool,
) -> Found:
    """Run what leads to the nodes named as ``roots`` on all ranks, and keep what each value depends on.

    ``shadows`` are those of the tensors of the batch that hold tokens; what else is in the batch is known, and so are
    buffers if they have their ``known_buffers`` values. ``free``: bits for ops without a rule.
    """
    width = next(iter(shadows.values())).deps.shape[-1]  # type: ignore[union-attr]  # tokens have sets
    memory, listings = Memory(width, frozenset()), Listings(width)
    batch = {name: value.clone() for name, value in batch.items()}
    for name, shadow in shadows.items():
        memory.write(batch[name], shadow)
    cluster = ShadowCluster(without_update(compiled), weights)
    for holdings in cluster.holdings:
        for value, tensor in holdings.items():
            if value.kind != "buffer" or not known_buffers:
                memory.write(tensor, constant(tensor.shape, False))
    key = torch.tensor([0, 0])
    memory.write(key, constant(key.shape, False))
    found = Found(compiled.mesh.with_micro(compiled.plan.microbatches))
    feed = whole_batch(batch, compiled.program)
    pieces = forward_pieces(compiled, roots)

    def run(executor: StepExecutor) -> None:
        mode = Interpreter(memory, True, free)
        mode.listings, mode.notes = listings, found.notes
        meeting = cluster.meeting
        with meeting.turn(), torch.no_grad(), collectives.use(executor.communicator), mode:
            prologue = executor._prologue(feed, key)

            def give(value: Value, sharding: Sharding) -> Tensor:
                return executor._micro_input(value, sharding, feed, prologue, key)

            _Forward(executor, meeting, mode, found).run(pieces, give)

    cluster.run(run)
    return found


Give = Callable[[Value, Sharding], Tensor]


class _Forward:
    """The forward pass of one rank, all its microbatches side by side."""

    def __init__(self, executor: StepExecutor, meeting: OneAtATime, mode: Interpreter, found: Found) -> None:
        self.executor, self.meeting, self.mode, self.found = executor, meeting, mode, found
        self.communicator = executor.communicator
        self.rank = executor.communicator.rank

    def run(self, pieces: Sequence[Piece], give: Give) -> None:
        """Run the pieces that this rank has, in order. ``give``: an input of a graph."""
        here: dict[tuple[int, str], Any] = {}
        for number, piece in enumerate(pieces):
            kept: dict[int, dict[fx.Node, Any]] = {}
            for m in range(self.executor.microbatches):
                if self._runs(piece.stage, m) == self.rank:
                    kept[m] = self._inputs(piece, m, here, give)
            self._nodes(piece, kept)
            for m, values in kept.items():
                for name, node in piece.gives.items():
                    place = piece.stage, piece.kind
                    readers = [later.stage for later in pieces[number + 1 :] if later.takes.get(name) == place]
                    here[m, name] = values[node]
                    for target in dict.fromkeys(self._runs(stage, m) for stage in readers):
                        if target != self.rank:
                            self.meeting.send(self.rank, target, f"{name} of microbatch {m}", [values[node]])

    def _runs(self, stage: int, microbatch: int) -> int:
        """The rank beside this one that runs a stage for a microbatch."""
        program = self.executor.rank_program
        if not isinstance(program, PipelineProgram):
            return self.rank
        pipe = program.schedule.rank(Action("F", stage, microbatch))
        return program.mesh.rank({**program.mesh.coordinates(self.rank), PIPE: pipe})

    def _inputs(
        self, piece: Piece, microbatch: int, here: dict[tuple[int, str], Any], give: Give
    ) -> dict[fx.Node, Any]:
        self.communicator.microbatch = microbatch
        made: dict[fx.Node, Any] = {}
        for value, node in piece.inputs.items():
            if value.kind != "value":
                made[node] = give(value, piece.graph.inputs[value])
                continue
            if (microbatch, value.name) not in here:
                source = self._runs(piece.takes[value.name][0], microbatch)
                (here[microbatch, value.name],) = self.meeting.receive(
                    self.rank, source, f"{value.name} of microbatch {microbatch}"
                )
            made[node] = here[microbatch, value.name]
        return made

    def _nodes(self, piece: Piece, kept: Mapping[int, dict[fx.Node, Any]]) -> None:
        """Node by node, each for all microbatches: so they meet where they meet."""
        last = {used: node for node in piece.nodes for used in node.all_input_nodes}
        stays = set(piece.gives.values())
        for node in piece.nodes:
            if node.op == "call_function" and kept:
                self._call(node, kept)
            for used in node.all_input_nodes:
                if last[used] is node and used not in stays:
                    for values in kept.values():
                        values.pop(used, None)

    def _call(self, node: fx.Node, kept: Mapping[int, dict[fx.Node, Any]]) -> None:
        target: Any = node.target
        if meets(node):
            (operand,) = node.all_input_nodes
            results = met(node, [values[operand] for values in kept.values()], self.communicator)
            for values, result in zip(kept.values(), results, strict=True):
                values[node] = result
        for m, values in kept.items():
            self.communicator.microbatch = m
            if not meets(node):
                arguments = fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
                values[node] = target(*arguments[0], **arguments[1])
            self._keep(node, values[node])

    def _keep(self, node: fx.Node, value: Any) -> None:
        sharding = annotation(node).sharding
        if not isinstance(value, Tensor) or sharding is None:
            return  # what is on its way between two layouts
        if sharding.local_shape(self.found.mesh) != tuple(value.shape):
            return  # a value that does not lie as it should: whoever reads it will differ
        shadow = self.mode.listings.settle(self.mode.memory.read(value), value)
        width = self.mode.memory.width
        deps = shadow.deps if shadow.deps is not None else torch.zeros(width, dtype=torch.int64)
        kept = Seen(dict(self.executor.coordinates), deps.expand(*value.shape, width), sharding)
        self.found.seen.setdefault(node, []).append(kept)
