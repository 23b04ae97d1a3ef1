"""A step of a rank on a cluster: prologue, microbatches and update on one clock, and what their times add up to.

All ranks do the same on devices of the same kind, so one of them stands for all; what differs between the groups of a
mesh axis (a degraded link, say) is in the cost of a message, which is that of the slowest group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from meshwright.compiler.cluster.cluster import Cluster
from meshwright.compiler.cluster.kernels import peak, with_attention
from meshwright.compiler.memory import memory
from meshwright.compiler.prediction import Execution, Prediction
from meshwright.compiler.summary import GraphSummary, Item, Kernel, RankSummary
from meshwright.compiler.timeline.accumulate import accumulation
from meshwright.compiler.timeline.clock import CONTENTION, LAUNCH, TRANSFER, Clock
from meshwright.compiler.timeline.fusion import fused
from meshwright.compiler.timeline.materialised import materialised
from meshwright.compiler.timeline.order import stretches
from meshwright.compiler.timeline.record import Recorder
from meshwright.compiler.timeline.staging import with_staging
from meshwright.compiler.timeline.tasks import Pricing, Task, coalesce, parts

SHOWN = 2
"""Microbatches at the beginning that are recorded one by one; of those that follow, only the last one is."""


def simulate(
    summary: RankSummary,
    cluster: Cluster,
    execution: Execution | None = None,
    *,
    spans: bool = False,
    exact: bool = False,
) -> Prediction:
    """Predict one step: its time by cause, and its memory.

    ``spans``: with everything on the timeline, for :func:`write_trace`; of more than three microbatches, the first
    two and the last one. ``exact``: every copy of a block and every microbatch is gone through, even when they have
    become alike (the result is the same, up to rounding).
    """
    execution = execution or Execution()
    cluster = replace(cluster, device=with_attention(cluster.device, execution.attention))
    summary = with_staging(summary, cluster)
    pricing = Pricing(cluster, summary)
    recorder = Recorder(summary) if spans else None
    clock = Clock(
        pricing.launch, cluster.device.efficiency.contention, observe=recorder.task if recorder is not None else None
    )
    player = Player(clock, pricing, execution.fusion, recorder, exact or spans)
    player.prepared("prologue", summary.prologue)()
    player.microbatches()
    clock.finish()  # the loss is looked at before anything is updated
    player.prepared("update", summary.update)()
    clock.finish()
    return _prediction(materialised(summary, execution.fusion), cluster, clock, recorder)


@dataclass(frozen=True)
class Player:
    """Plays the graphs of a step on a clock."""

    clock: Clock
    pricing: Pricing
    fusion: str
    recorder: Recorder | None = None
    exact: bool = False

    def prepared(self, name: str, graph: GraphSummary) -> Callable[[], None]:
        """What plays a graph once."""
        found = parts(graph, fused(graph, self.fusion), self.pricing)

        def tasks(positions: tuple[int, ...]) -> list[Task]:
            sequence = [found[p] for p in positions if p in found]
            return coalesce(sequence, self.pricing.launch, whole=self.recorder is None)

        rounds = [
            (tasks(s.first), tasks(s.steady), tasks(s.last), s.rounds)
            for s in stretches(graph.items, self.pricing.summary.repeats)
        ]

        def play() -> None:
            if self.recorder is not None:
                self.recorder.begin(name, graph, found, self.clock.now)
            for first, steady, last, times in rounds:
                self.clock.play(first)
                if times > 2:
                    self.clock.replay(steady, times - 2, exact=self.exact)
                self.clock.play(last)
            if self.recorder is not None:
                self.recorder.end(self.clock.now)

        return play

    def microbatches(self) -> None:
        """Play ``micro`` once for each microbatch; gradients are added up after all but the first."""
        summary, clock, recorder = self.pricing.summary, self.clock, self.recorder
        play = self.prepared("micro", summary.micro)
        adding = accumulation(summary, self.fusion, self.pricing)

        def again() -> None:
            play()
            clock.play(adding)

        play()
        left = summary.microbatches - 1
        if recorder is None:
            clock.repeat(again, left, exact=self.exact)
            return
        hidden = max(0, left - SHOWN)
        for number in range(left):
            with recorder.paused(clock, hidden if SHOWN - 1 <= number < SHOWN - 1 + hidden else 0):
                again()


def _prediction(summary: RankSummary, cluster: Cluster, clock: Clock, recorder: Recorder | None) -> Prediction:
    efficiency, seconds = cluster.device.efficiency, clock.now
    spent: dict[str, dict[str, float]] = {group: {} for group in ("compute", "exposed", "communication", "other")}
    for (group, name), value in clock.spent.items():
        spent[group][name] = value
    needs = memory(summary)
    device_memory = int(needs.peak * (1 + efficiency.fragmentation)) + efficiency.reserve
    able = summary.mesh.ranks * peak(cluster.device, main_dtype(summary.micro.items)) * seconds
    return Prediction(
        seconds=seconds,
        compute=spent["compute"],
        exposed=spent["exposed"],
        communication=spent["communication"],
        other={LAUNCH: 0.0, TRANSFER: 0.0, CONTENTION: 0.0, "bubble": 0.0, **spent["other"]},
        memory=needs,
        device_memory=device_memory,
        fits=device_memory <= cluster.device.memory,
        mfu=summary.model_flops / able if able else 0.0,
        tokens_per_second=summary.tokens / seconds if seconds else 0.0,
        spans=recorder.spans() if recorder is not None else (),
    )


def main_dtype(items: Iterable[Item]) -> str:
    """The dtype in which most is computed."""
    flops: dict[str, float] = {}
    for item in items:
        if isinstance(item.work, Kernel) and item.work.kind in ("matmul", "attention"):
            flops[item.work.dtype] = flops.get(item.work.dtype, 0.0) + item.work.flops
    return max(flops, key=lambda name: flops[name], default="f32")
