"""What a source's framework does besides its plan, where its source tells: how it cuts a pipeline, how it sums
gradients, what it keeps.

Aleph Alpha's, read in the repository ``Aleph-Alpha/scaling`` at 78489292be:

- ``core/nn/parallel_module/pipeline_partitioning.py``: embedding, layers, last norm and head are items of one list,
  of which every stage takes as many, the first ones those left over;
- ``core/optimizer/allreduce.py``, ``parameter_group.py``: after the last microbatch gradients are joined, summed in 32
  bits by an all-reduce and copied back, in buckets of 500 million; each rank takes its part, and updated weights are
  gathered;
- ``core/nn/parallel_module/communicator.py``: stages wait until what they send has left;
- ``core/nn/parallel_module/parallel_module.py``: outputs of a stage are kept until their gradient comes, those of the
  last one (logits) until the next but one microbatch.

DeepSpeed's pipelines (BigScience) wait for what they send too (``deepspeed/runtime/pipe/p2p.py``, from memory).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from benchmarks.published.fitted import RATES
from benchmarks.published.rows import Row
from meshwright.compiler.cluster.cluster import Cluster
from meshwright.compiler.cluster.collectives import message_cost
from meshwright.compiler.mesh import Mesh
from meshwright.compiler.prediction import Execution, Prediction
from meshwright.compiler.summary import GraphSummary, Pass, RankSummary, StagedSummary

ALEPH_ALPHA, DEEPSPEED = "aleph alpha", "bigscience"
"""Words of the titles of sources."""
UNTOLD = (ALEPH_ALPHA,)
"""Whose rows do not tell the network."""
BUCKET = 500_000_000
"""Elements that it sums in one go."""
PASSES_OVER_GRADIENTS = 24
"""Bytes of each gradient that are read and written to join, divide, widen, narrow and part them."""
_DATA = ("data",)


def of(row: Row) -> str:
    """The framework of a row, if what it does is known; else empty."""
    return next((word for word in (ALEPH_ALPHA, DEEPSPEED) if word in row.source.lower()), "")


def execution(row: Row) -> Execution:
    """How the source's framework runs ops: written kernels for norms, gates and softmax, or all chains fused."""
    return Execution(row.habits.kernels, row.habits.attention, waits_for_sends=bool(of(row)))


def on(row: Row, cluster: Cluster, rates: Mapping[str, float] = RATES) -> Cluster:
    """The cluster with the rate of the network that was fitted for the source, where its rows do not tell one."""
    rate = None if row.machine.interconnect else rates.get(of(row))
    if rate is None:
        return cluster
    return replace(cluster, tiers=(cluster.tiers[0], *(replace(t, bandwidth=rate) for t in cluster.tiers[1:])))


def starts(row: Row) -> tuple[int, ...] | None:
    """The layers that stages begin with; None: where they are balanced."""
    layers, stages = row.shape.layers, row.layout.pipe * row.layout.virtual
    if of(row) == ALEPH_ALPHA:
        each, left = divmod(layers + 3, stages)
        ends = [each * (i + 1) + min(i + 1, left) for i in range(stages)]
        return (0, *(max(1, end - 1) for end in ends[:-1]))
    return tuple(range(0, layers, layers // stages)) if layers % stages == 0 else None


def without_wide_tables(summary: RankSummary | StagedSummary) -> RankSummary | StagedSummary:
    """The summary without the 32-bit table in which our embedding sums its gradient: PyTorch's takes none."""
    if isinstance(summary, RankSummary):
        return replace(summary, micro=_without(summary.micro))
    passes: dict[Pass, GraphSummary] = {kind: _without(graph) for kind, graph in summary.passes.items()}
    return replace(summary, passes=passes)


def _without(graph: GraphSummary) -> GraphSummary:
    left = (b for b in graph.buffers if b.kind != "workspace" or not b.name.startswith("embedding_backward"))
    return replace(graph, buffers=tuple(left))


@dataclass(frozen=True)
class Besides:
    """What comes on top of a prediction."""

    row: Row
    mesh: Mesh
    cluster: Cluster

    def __call__(self, found: Prediction) -> Prediction:
        """The prediction of the step as the row's framework runs it."""
        if of(self.row) != ALEPH_ALPHA or "data" not in self.mesh.names:
            return found
        seconds = found.seconds - found.exposed.get("data", 0.0) + self._summing(found)
        efficiency = self.cluster.device.efficiency
        more = self._in_flight(found) - found.memory.peak
        updating = self._updating(found)
        wasted = 1 + efficiency.fragmentation
        device_memory = max(found.device_memory + int(more * wasted), int(updating * wasted) + efficiency.reserve)
        return replace(
            found,
            seconds=seconds,
            memory=replace(found.memory, peak=max(found.memory.peak + more, updating)),
            device_memory=device_memory,
            fits=device_memory <= self.cluster.device.memory,
        )

    def _summing(self, found: Prediction) -> float:
        """Gradients after the last microbatch, then weights."""
        elements = _elements(found)
        times = max(1, round(elements / BUCKET))
        each = elements // times
        device = self.cluster.device
        moving = (
            message_cost(self.cluster, self.mesh, _DATA, "all-reduce", 4 * each).seconds
            + message_cost(self.cluster, self.mesh, _DATA, "all-gather", 2 * each).seconds
        )
        return times * moving + elements * PASSES_OVER_GRADIENTS / (device.bandwidth * device.efficiency.memory)

    def _updating(self, found: Prediction) -> int:
        """16-bit weights and gradients, the rank's part of the state, and one bucket joined in 16 and 32 bits."""
        shape, tensor = self.row.shape, self.row.layout.tensor
        elements = _elements(found)
        # a bucket is closed by the tensor with which it is full
        largest = max(shape.vocabulary * shape.hidden // tensor, BUCKET + shape.inner * shape.hidden // tensor)
        bucket = min(elements, largest)
        return 4 * elements + found.memory.most.get("optimizer state", 0) + 6 * bucket

    def _in_flight(self, found: Prediction) -> int:
        """The microbatches: outputs of stages wait for their gradients, logits for the next but one microbatch."""
        layout, shape = self.row.layout, self.row.shape
        tokens = layout.microbatch * shape.time
        logits, output = 2 * tokens * shape.vocabulary, 2 * tokens * shape.hidden
        if found.flow is None:
            return found.memory.peak + (logits if layout.microbatches > 1 else 0)
        ranks = len(found.flow.memory)
        kept = [min(ranks - rank, layout.microbatches) * output for rank in range(ranks)]
        kept[-1] = logits
        return max(memory + more for memory, more in zip(found.flow.memory, kept, strict=True))


def _elements(found: Prediction) -> int:
    """The parameters of the fullest rank, which are held in 16 bits."""
    return found.memory.most.get("parameters", 0) // 2
