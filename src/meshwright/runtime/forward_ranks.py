"""The forward pass of all ranks of a compiled step, one rank at a time, and what is made of it node by node.

The ranks are those of the virtual cluster. One computes at a time, so what is kept beside the tensors of all may be in
one place, and a mode that follows ops sees what a collective does: it moves or adds the tensors of a group.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, fx

from meshwright.compiler.graph import collectives
from meshwright.compiler.graph.forward_pieces import Piece, forward_pieces
from meshwright.compiler.graph.meeting import meets
from meshwright.compiler.graph.pipeline_program import Compiled, PipelineProgram
from meshwright.compiler.graph.program import Signature, Value
from meshwright.compiler.graph.rank_program import LocalGraph
from meshwright.compiler.mesh import Sharding
from meshwright.compiler.plan import PIPE
from meshwright.compiler.schedules.table import Action
from meshwright.runtime.materialize import Weights
from meshwright.runtime.one_at_a_time import OneAtATime
from meshwright.runtime.rendezvous import Rendezvous
from meshwright.runtime.rounds import met
from meshwright.runtime.step_executor import Feed, StepExecutor
from meshwright.runtime.virtual import VirtualCluster


def without_update(compiled: Compiled) -> Compiled:
    """The same with nothing to do at the end of a step, which would have to be prepared for every rank."""
    if isinstance(compiled, PipelineProgram):
        return replace(compiled, stages=tuple(replace(stage, update=()) for stage in compiled.stages))
    graph = fx.Graph()
    graph.output(())
    module = fx.GraphModule(torch.nn.Module(), graph)
    return replace(compiled, update=LocalGraph(module, Signature((), ()), {}, {}))


class OneByOne(VirtualCluster):
    """The virtual cluster, one rank at a time."""

    meeting: OneAtATime

    def _meet(self) -> Rendezvous:
        self.meeting = OneAtATime(self.mesh.ranks)
        return self.meeting


def cluster_of(compiled: Compiled, weights: Weights) -> OneByOne:
    """The ranks of a step that runs forward alone."""
    return OneByOne(without_update(compiled), weights)


Keep = Callable[[fx.Node, Any, StepExecutor], None]
"""Is given the value that a node has on one rank, in the microbatch that the rank's communicator says."""
Give = Callable[[Value, Sharding], Tensor]


@dataclass(frozen=True)
class Following:
    """How a forward pass is followed. ``mode``: entered by each rank while it computes; ``keep``: looks at each value;
    ``in_place_of``: by function that a node may call, what is called instead."""

    mode: Callable[[], AbstractContextManager[Any]]
    keep: Keep
    in_place_of: Mapping[Any, Callable[..., Any]] = field(default_factory=dict)


def run_forward(cluster: OneByOne, feed: Feed, key: Tensor, roots: Collection[str], following: Following) -> None:
    """Run what leads to the nodes named as ``roots`` on all ranks. The ``key`` of random numbers is read itself, not a
    copy of it. Raises MeshwrightError and InternalError for a program that does not run."""
    compiled = cluster.rank_program
    pieces = forward_pieces(compiled, roots)
    hoisted = any(value.kind == "prologue" for piece in pieces for value in piece.inputs)

    def run(executor: StepExecutor) -> None:
        meeting = cluster.meeting
        with meeting.turn(), torch.no_grad(), collectives.use(executor.communicator), following.mode():
            prologue = executor._prologue(feed, key) if hoisted else {}

            def give(value: Value, sharding: Sharding) -> Tensor:
                return executor._micro_input(value, sharding, feed, prologue, key)

            _Forward(executor, meeting, following).run(pieces, give)

    cluster.run(run)


class _Forward:
    """The forward pass of one rank, all its microbatches side by side."""

    def __init__(self, executor: StepExecutor, meeting: OneAtATime, following: Following) -> None:
        self.executor, self.meeting, self.following = executor, meeting, following
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
        target: Any = self.following.in_place_of.get(node.target, node.target)
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
            self.following.keep(node, values[node], self.executor)
