"""All ranks of a compiled step, forward, read a second time: by intervals of positions, composed over the op rules.

Intervals reach from an index of what a rank holds to tokens by their numbers in the whole batch: of a part that begins
at 6, the element 0 depends on token 6. Who joins parts moves the intervals, by the rules of the ops that join; who adds
them takes both.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx

from meshwright.compiler.causality.call import tensors_in
from meshwright.compiler.causality.rank_findings import called
from meshwright.compiler.causality.second.knowledge import Knowledge
from meshwright.compiler.causality.second.messages import TOLD
from meshwright.compiler.causality.second.opinion import LOOSE, Opinion, worst_of
from meshwright.compiler.causality.second.reader import Reader
from meshwright.compiler.causality.second.seen import Along, blank
from meshwright.compiler.causality.second.shards import shard_opinion, strays
from meshwright.compiler.causality.tokens import Numbering
from meshwright.compiler.graph.pipeline_program import Compiled
from meshwright.compiler.graph.program import StepProgram, annotation
from meshwright.compiler.mesh import Mesh, Sharding
from meshwright.runtime.feed import whole_batch
from meshwright.runtime.forward_ranks import Following, cluster_of, run_forward
from meshwright.runtime.layout import Coordinates, positions
from meshwright.runtime.materialize import Weights
from meshwright.runtime.step_executor import Feed, StepExecutor


@dataclass
class _Met:
    """What a reading of ranks comes across, node by node."""

    knowledge: Knowledge
    mesh: Mesh
    """With the axis ``micro``."""
    rows: int
    roots: Collection[str]
    outputs: list[Opinion] = field(default_factory=list)
    stopped: fx.Node | None = None
    """Where the reading came to its end."""
    strays: fx.Node | None = None
    """The first value that is not bounded by its own position and row."""

    def keep(self, node: fx.Node, value: Any, executor: StepExecutor) -> None:
        """Look at the value of a node, on one rank in one microbatch."""
        seens = [self.knowledge.seen(one) for one in tensors_in(value)]
        if self.knowledge.stopped and self.stopped is None:
            self.stopped = node
        sharding, at = annotation(node).sharding, executor.coordinates
        lies = isinstance(value, Tensor) and sharding is not None
        if not lies or sharding is None or sharding.local_shape(self.mesh) != tuple(value.shape):
            if node.name in self.roots:
                self.outputs.append(Opinion("not shown", reason=f"%{node.name} does not lie as it should"))
            return
        if self.strays is None and strays(seens[0], sharding, self.mesh, at):
            self.strays = node
        if node.name in self.roots:
            self.outputs.append(shard_opinion(seens[0], sharding, self.mesh, at, self.rows))


def read_intervals(
    compiled: Compiled,
    weights: Weights,
    batch: Mapping[str, Tensor],
    numbers: Numbering,
    roots: Collection[str],
) -> Opinion:
    """The second reading of what all ranks run forward, read at the nodes named as ``roots``. Where it says that
    something is not causal, or not shown, it names the node. Raises
    MeshwrightError and InternalError for a program that does not run."""
    knowledge = Knowledge()
    cluster = cluster_of(compiled, weights)
    for holdings in cluster.holdings:
        for value, held in holdings.items():
            if value.kind == "parameter":
                knowledge.moved_weight(held)
    mesh = compiled.mesh.with_micro(compiled.plan.microbatches)
    met = _Met(knowledge, mesh, numbers.rows, roots)
    following = Following(lambda: Reader(knowledge), met.keep, TOLD)
    run_forward(cluster, _feed(knowledge, compiled.program, batch, numbers), torch.tensor([0, 0]), roots, following)
    masks = any(value.dim() > 1 for name, value in batch.items() if name not in (*numbers.names, *numbers.whole))
    said = replace(worst_of(met.outputs, knowledge, masks), lengths=(numbers.length,))
    node = met.stopped if knowledge.stopped else met.strays
    return replace(said, reason=_at(node, said)) if said.verdict != "CAUSAL" and node is not None else said


def _feed(knowledge: Knowledge, program: StepProgram, batch: Mapping[str, Tensor], numbers: Numbering) -> Feed:
    """Gives the ranks their shards of the batch, of which it is known which tokens they are."""
    whole = whole_batch(batch, program)

    def feed(name: str, sharding: Sharding, mesh: Mesh, coordinates: Coordinates) -> Tensor:
        shard = whole(name, sharding, mesh, coordinates)
        if name in numbers.names or name in numbers.whole:
            row = program.batch_dims[name] or 0
            made = blank(shard.shape)
            along = [
                _tokens(made.parts()[dim], positions(sharding.dims[dim], mesh, coordinates), sharding.shape[dim])
                for dim in ((row, row + 1) if name in numbers.names else (row,))
            ]
            knowledge.know(shard, replace(made, row=along[0], time=along[1] if len(along) > 1 else Along()))
        return shard

    return feed


def _tokens(parts: Sequence[int], places: Tensor, size: int) -> Along:
    """Of a dim of the batch. ``places``: which of the ``size`` indices of the whole those of a shard are, -1 for
    padding."""
    if size == 1:
        return Along()
    starts = {place - index for index, place in enumerate(places.tolist()) if place >= 0}
    if len(starts) != 1:
        return Along(anywhere=bool(starts))
    (start,) = starts
    return Along({parts[0]: (start, start)}) if parts else Along(fixed=(start, start))


def _at(node: fx.Node, said: Opinion) -> str:
    """Why it is not causal, with the node of the ranks' program and the user's line."""
    origin = annotation(node).origin
    line = f", {Path(origin.file).name}:{origin.line}" if origin.file else ""
    why = said.reason or (LOOSE if said.verdict == "not shown" else "")
    made = node.all_input_nodes[0] if node.target is operator.getitem else node
    return f"{why}{': ' if why else ''}%{made.name} = {called(made)}{line}"
