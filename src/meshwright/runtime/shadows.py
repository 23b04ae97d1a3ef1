"""All ranks of a compiled step, forward, on values with shadows: what each value of each rank depends on.

The shadows of all ranks are in one memory, so a collective needs no rule: whoever moves or adds the tensors of a group
moves or joins what they depend on.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from meshwright.compiler.causality.interpreter import Interpreter, Notes
from meshwright.compiler.causality.listings import Listings
from meshwright.compiler.causality.memory import Memory
from meshwright.compiler.causality.shadow import Shadow, constant
from meshwright.compiler.graph.pipeline_program import Compiled
from meshwright.compiler.graph.program import annotation
from meshwright.compiler.mesh import Mesh, Sharding
from meshwright.compiler.plan import PIPE
from meshwright.runtime.feed import whole_batch
from meshwright.runtime.forward_ranks import Following, cluster_of, run_forward
from meshwright.runtime.layout import positions
from meshwright.runtime.materialize import Weights
from meshwright.runtime.step_executor import StepExecutor


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
    cluster = cluster_of(compiled, weights)
    for holdings in cluster.holdings:
        for value, tensor in holdings.items():
            if value.kind != "buffer" or not known_buffers:
                memory.write(tensor, constant(tensor.shape, False))
    key = torch.tensor([0, 0])
    memory.write(key, constant(key.shape, False))
    found = Found(compiled.mesh.with_micro(compiled.plan.microbatches))

    def mode() -> Interpreter:
        made = Interpreter(memory, True, free)
        made.listings, made.notes = listings, found.notes
        return made

    def keep(node: fx.Node, value: Any, executor: StepExecutor) -> None:
        sharding = annotation(node).sharding
        if not isinstance(value, Tensor) or sharding is None:
            return  # what is on its way between two layouts
        if sharding.local_shape(found.mesh) != tuple(value.shape):
            return  # a value that does not lie as it should: whoever reads it will differ
        shadow = listings.settle(memory.read(value), value)
        deps = shadow.deps if shadow.deps is not None else torch.zeros(width, dtype=torch.int64)
        kept = Seen(dict(executor.coordinates), deps.expand(*value.shape, width), sharding)
        found.seen.setdefault(node, []).append(kept)

    run_forward(cluster, whole_batch(batch, compiled.program), key, roots, Following(mode, keep))
    return found
