"""The part of a step that one stage of a pipeline does, and what its passes take: time by cause, and memory.

A stage has some blocks and the homes of what stands in none. Its passes are played on the same clock as a whole step,
each by itself: messages that are begun ahead hide behind the computation of their own pass.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from meshwright.compiler.cluster.cluster import Cluster
from meshwright.compiler.cluster.kernels import with_attention
from meshwright.compiler.memory import memory
from meshwright.compiler.mesh import Mesh
from meshwright.compiler.prediction import Execution, Memory
from meshwright.compiler.repetition import within
from meshwright.compiler.summary import (
    EVERYWHERE,
    PASSES,
    Buffer,
    GraphSummary,
    Item,
    Pass,
    RankSummary,
    StagedSummary,
    Wait,
)
from meshwright.compiler.timeline.accumulate import accumulation
from meshwright.compiler.timeline.clock import Clock
from meshwright.compiler.timeline.materialised import materialised
from meshwright.compiler.timeline.predict import Player
from meshwright.compiler.timeline.staging import with_staging
from meshwright.compiler.timeline.tasks import Pricing

Spent = Mapping[tuple[str, str], float]
"""Seconds by group and name, as a clock keeps them."""
_NOTHING = GraphSummary((), ())


@dataclass(frozen=True)
class Shape:
    """What a stage consists of: how many blocks it has of each kind, named by the summary's own, in order; and whose
    homes it is."""

    blocks: tuple[tuple[str, int], ...]
    homes: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Passed:
    """A pass, or the update, of a stage."""

    seconds: float
    spent: Spent
    measure: Callable[[], Memory] = field(repr=False, compare=False)

    @cached_property
    def memory(self) -> Memory:
        """Of what it makes itself."""
        return self.measure()


@dataclass(frozen=True)
class StageUse:
    """What a stage takes."""

    passes: Mapping[Pass, Passed]
    giving: Pass
    """The pass that gives the gradients of the weights."""
    first: Passed
    """That pass of the first microbatch, whose gradients stay to be added to."""
    updating: Callable[[], Passed] = field(repr=False, compare=False)
    held: Mapping[str, int]
    """By kind, throughout; with gradient accumulators."""
    until_input: Mapping[str, int]
    """By kind: what a microbatch keeps from its forward pass to the backward pass that gives the gradient of the
    input."""
    until_weights: Mapping[str, int]
    """By kind: what it keeps from its forward pass to that of the weights."""
    between: Mapping[str, int]
    """By kind: what it keeps from the one backward pass to the other."""

    @property
    def costs(self) -> tuple[float, float, float]:
        """``(forward, input, weight)`` in seconds."""
        f, i, w = (self.passes[kind].seconds for kind in PASSES)
        return f, i, w

    @cached_property
    def update(self) -> Passed:
        return self.updating()


@dataclass
class StagePricer:
    """Prices stages of one summary on one cluster; each shape once."""

    summary: StagedSummary
    cluster: Cluster
    execution: Execution
    _known: dict[Shape, StageUse] = field(default_factory=dict)
    _graphs: dict[tuple[str, frozenset[tuple[str, str]]], GraphSummary] = field(default_factory=dict)
    """What is left of a graph in stages that have the same places, however often."""
    _prologue: Passed | None = None

    def __post_init__(self) -> None:
        self.cluster = replace(self.cluster, device=with_attention(self.cluster.device, self.execution.attention))

    def __call__(self, shape: Shape) -> StageUse:
        if shape not in self._known:
            self._known[shape] = self._stage(shape)
        return self._known[shape]

    def prologue(self) -> Passed:
        """What is done of the batch before the microbatches."""
        if self._prologue is None:
            whole = self._rank(self.summary.prologue, {})
            self._prologue = self._played(whole)
        return self._prologue

    def _stage(self, shape: Shape) -> StageUse:
        summary = self.summary
        cut = Cut(summary, shape)
        held: Counter[str] = Counter()
        for one in summary.held:
            held[one.kind] += one.bytes * cut.times(one.block, one.home)
        kept: dict[tuple[Pass, Pass], Counter[str]] = {}
        for left in summary.kept:
            found = kept.setdefault((left.made, left.until), Counter())
            found[left.kind] += left.bytes * cut.times(left.block, left.home)
        passes: dict[Pass, Passed] = {}
        giving: Pass = "W" if summary.passes["W"].items else "I"
        for kind in PASSES:
            added = held["gradients"] if kind == giving and summary.microbatches > 1 else 0
            passes[kind] = self._played(self._rank(self._cut(kind, summary.passes[kind], cut), cut.repeats, added))

        def first() -> Memory:
            graph = _staying(self._cut(giving, summary.passes[giving], cut), cut.repeats, held["gradients"])
            return self._memory(self._rank(graph, cut.repeats))

        return StageUse(
            passes=passes,
            giving=giving,
            first=replace(passes[giving], measure=first),
            updating=lambda: self._played(self._rank(self._cut("update", summary.update, cut), cut.repeats)),
            held=dict(held),
            until_input=dict(kept.get(("F", "I"), {})),
            until_weights=dict(kept.get(("F", "W"), {})),
            between=dict(kept.get(("I", "W"), {})),
        )

    def _cut(self, name: str, graph: GraphSummary, cut: Cut) -> GraphSummary:
        key = name, cut.places(graph)
        if key not in self._graphs:
            self._graphs[key] = cut.graph(graph)
        return self._graphs[key]

    def _rank(self, graph: GraphSummary, repeats: Mapping[str, int], accumulators: int = 0) -> RankSummary:
        summary = self.summary
        return RankSummary(
            mesh=Mesh(summary.mesh.axes),
            microbatches=summary.microbatches,
            prologue=_NOTHING,
            micro=graph,
            update=_NOTHING,
            held={},
            accumulators=accumulators,
            repeats=repeats,
        )

    def _played(self, rank: RankSummary) -> Passed:
        """``rank`` has the one graph as ``micro``."""
        pricing = Pricing(self.cluster, rank)
        clock = Clock(pricing.launch, self.cluster.device.efficiency.contention)
        fusion = self.execution.fusion
        Player(clock, pricing, fusion).prepared("micro", rank.micro)()
        if rank.accumulators:
            once = Clock(pricing.launch)
            once.play(accumulation(rank, fusion, pricing))
            share = (rank.microbatches - 1) / rank.microbatches  # all but the first are added to what is there
            clock.spent.update({key: clock.spent[key] + seconds * share for key, seconds in once.spent.items()})
            clock.now += once.now * share
        clock.finish()
        return Passed(clock.now, dict(clock.spent), lambda: self._memory(replace(rank, accumulators=0)))

    def _memory(self, rank: RankSummary) -> Memory:
        return memory(materialised(with_staging(rank, self.cluster), self.execution.fusion))


def _staying(graph: GraphSummary, repeats: Mapping[str, int], accumulators: int) -> GraphSummary:
    """A pass whose gradients stay when they have been made, in the dtype of their ``accumulators``."""
    made = [b for b in graph.buffers if b.kind == "gradients" and b.last < len(graph.items)]
    total = sum(b.bytes * repeats.get(b.block, 1) for b in made)
    share = accumulators / total if total else 0.0
    stay = [
        replace(b, bytes=int(b.bytes * share), born=b.last + 1, last=len(graph.items))
        for b in made
        if b.last + 1 < len(graph.items)
    ]
    return replace(graph, buffers=(*graph.buffers, *stay))


class Cut:
    """What of a summary's graphs a stage has."""

    def __init__(self, summary: StagedSummary, shape: Shape) -> None:
        counts = dict(shape.blocks)
        first_of = {other: first for first, other in summary.groups}
        for first, other in summary.groups:
            together = counts.pop(first, 0) + counts.pop(other, 0)
            if together and first != other:
                counts[first] = 1
                together -= 1
            if together:
                counts[other] = together
        self._counts = counts
        self._homes = shape.homes
        self._blocks = summary.blocks
        self._times: dict[tuple[str, str], int] = {}
        outer = {block: counts[block] for block in first_of if counts.get(block)}
        self.repeats: dict[str, int] = {}
        for name, count in summary.repeats.items():
            around = next((block for block in first_of if within(name, block)), None)
            if around is None:
                self.repeats[name] = count
            elif around in outer:
                self.repeats[name] = outer[around]

    def times(self, block: str, home: str) -> int:
        """How often the stage has what belongs there."""
        key = (block, home)
        if key not in self._times:
            self._times[key] = self._count(block, home)
        return self._times[key]

    def _count(self, block: str, home: str) -> int:
        if home:
            return int(home == EVERYWHERE or home in self._homes)
        around = next((b for b in self._blocks if within(block, b)), None)
        return 1 if around is None else self._counts.get(around, 0)

    def places(self, graph: GraphSummary) -> frozenset[tuple[str, str]]:
        """The blocks and homes of a graph that the stage has."""
        if "places" not in graph.found:
            items, buffers = graph.items, graph.buffers
            graph.found["places"] = {(i.block, i.home) for i in items} | {(b.block, b.home) for b in buffers}
        return frozenset(place for place in graph.found["places"] if self.times(*place))

    def graph(self, graph: GraphSummary) -> GraphSummary:
        """The items and buffers of the stage."""
        places: list[int] = []
        """By item: its new position, or that of the last one before that stays."""
        items: list[Item] = []
        stays: list[bool] = []
        for item in graph.items:
            mine = self.times(item.block, item.home) > 0
            if mine and isinstance(item.work, Wait) and not stays[item.work.message]:
                mine = False
            if mine:
                reads = tuple(places[r] if r >= 0 and stays[r] else -1 for r in item.reads)
                work = item.work
                if isinstance(work, Wait) and places[work.message] != work.message:
                    work = Wait(places[work.message])
                same = reads == item.reads and work is item.work
                items.append(item if same else replace(item, reads=reads, work=work))
            stays.append(mine)
            places.append(len(items) - 1)
        end = len(graph.items)

        def there(position: int) -> int:
            return len(items) if position >= end else position if position < 0 else max(places[position], 0)

        buffers: list[Buffer] = []
        for buffer in graph.buffers:
            mine = stays[buffer.born] if 0 <= buffer.born < end else self.times(buffer.block, buffer.home) > 0
            if mine:
                buffers.append(replace(buffer, born=there(buffer.born), last=there(buffer.last)))
        results = frozenset(places[r] for r in graph.results if stays[r])
        return GraphSummary(tuple(items), tuple(buffers), results)
