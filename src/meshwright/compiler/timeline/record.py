"""Records what runs when, and what memory is used for meanwhile, as spans for a trace.

Resources: ``step`` (graphs), ``compute``, ``waiting``, one for every kind of link and direction of the host link, and
``memory``, whose spans are moments with the bytes of every kind in their notes.
"""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from meshwright.compiler.prediction import Span
from meshwright.compiler.summary import Buffer, GraphSummary, Item, Kernel, Message, RankSummary, Transfer
from meshwright.compiler.timeline.clock import Clock
from meshwright.compiler.timeline.tasks import Await, Copy, Run, Task


class Recorder:
    """Observes a clock."""

    def __init__(self, summary: RankSummary) -> None:
        self._summary = summary
        self._spans: list[Span] = []
        self._graph = GraphSummary((), ())
        self._name = ""
        self._start = 0.0
        self._microbatch = 0
        self._hidden = False
        self._live: Counter[str] = Counter()
        self._changes: dict[int, tuple[list[Buffer], list[Buffer]]] = {}
        self._done: Counter[int] = Counter()

    def begin(self, name: str, graph: GraphSummary, hosts: Mapping[int, object], now: float) -> None:
        """A graph begins; ``hosts`` are the positions of the items that occupy something."""
        self._name, self._graph, self._start = name, graph, now
        self._done = Counter()
        if name == "micro":
            self._microbatch += 1
        self._live = Counter(self._summary.held)
        if name == "micro":
            self._live["gradients"] += self._summary.accumulators
        self._changes = {}
        places = _Places(graph.items, sorted(hosts))
        for buffer in graph.buffers:
            if buffer.born < 0:
                self._live[buffer.kind] += buffer.bytes * self._summary.repeats.get(buffer.block, 1)
            else:
                self._changes.setdefault(places.of(buffer.born), ([], []))[0].append(buffer)
            if buffer.last < len(graph.items):
                self._changes.setdefault(places.of(max(buffer.last, 0)), ([], []))[1].append(buffer)
        self._memory(now)

    def end(self, now: float) -> None:
        """The graph is done."""
        notes = {"microbatch": f"{self._microbatch} of {self._summary.microbatches}"} if self._name == "micro" else {}
        self._add(Span("step", self._name, self._start, now, notes=notes))

    @contextmanager
    def paused(self, clock: Clock, hidden: int) -> Iterator[None]:
        """What runs inside is not recorded if ``hidden``; one span stands for all that are hidden."""
        before, self._hidden = self._hidden, bool(hidden)
        start = clock.now
        yield
        self._hidden = before
        if hidden:
            last = self._spans[-1] if self._spans else None
            name = f"{hidden} microbatches like the one before"
            if last is not None and last.name == name:
                self._spans.pop()
                start = last.start
            self._spans.append(Span("step", name, start, clock.now))

    def spans(self) -> tuple[Span, ...]:
        """All that was recorded."""
        return tuple(self._spans)

    def task(self, task: Task, start: float, end: float) -> None:
        """A task has been given its time."""
        if isinstance(task, Run):
            for position in task.positions:
                self._kernel(position, start, end)
        elif isinstance(task, Await):
            if end > start:
                self._add(self._span("waiting", task.message, start, end))
            self._change(task.position, start, end)
        elif isinstance(task, Copy):
            self._add(self._span(f"host link, {task.direction}", task.position, start, end))
            self._change(task.position, start, end)
        else:
            self._add(self._span(task.queue, task.position, start, end))
            self._change(task.position, start, start)

    def _kernel(self, position: int, start: float, end: float) -> None:
        if position < 0:
            self._add(Span("compute", "gradients added up", start, end, "backward"))
            return
        self._add(self._span("compute", position, start, end))
        self._change(position, start, end)

    def _change(self, position: int, start: float, end: float) -> None:
        self._done[position] += 1
        born, dead = self._changes.get(position, ((), ()))
        if born:
            for buffer in born:
                self._live[buffer.kind] += buffer.bytes
            self._memory(start)
        if dead:
            for buffer in dead:
                self._live[buffer.kind] -= buffer.bytes
            self._memory(end)

    def _memory(self, now: float) -> None:
        notes = {kind: str(size) for kind, size in self._live.items()}
        self._add(Span("memory", "memory", now, now, notes=notes))

    def _span(self, resource: str, position: int, start: float, end: float) -> Span:
        item = self._graph.items[position]
        notes = _notes(item)
        count = self._summary.repeats.get(item.block, 1)
        if count > 1:
            notes["copy"] = f"{self._done[position] + 1} of {count}"
        if self._name == "micro" and self._summary.microbatches > 1:
            notes["microbatch"] = str(self._microbatch)
        return Span(resource, item.name, start, end, item.phase, item.block, notes)

    def _add(self, span: Span) -> None:
        if not self._hidden:
            self._spans.append(span)


class _Places:
    """Where buffers of items that occupy nothing (views, ops within a fused kernel) come and go: with the item before
    them in the same block that occupies something."""

    def __init__(self, items: tuple[Item, ...], hosts: list[int]) -> None:
        self._items = items
        self._by_block: dict[str, list[int]] = {}
        for position in hosts:
            self._by_block.setdefault(items[position].block, []).append(position)
        self._hosts = hosts

    def of(self, position: int) -> int:
        hosts = self._by_block.get(self._items[position].block) or self._hosts
        if not hosts:
            return position
        return hosts[max(0, bisect.bisect_right(hosts, position) - 1)]


def _notes(item: Item) -> dict[str, str]:
    work = item.work
    if isinstance(work, Kernel):
        notes = {"op": work.op, "kind": work.kind, "flops": f"{work.flops:.4g}"}
        notes |= {"read": str(work.read), "written": str(work.written), "dtype": work.dtype}
        if work.sizes:
            notes["sizes"] = " ".join(map(str, work.sizes))
    elif isinstance(work, Message):
        notes = {"kind": work.kind, "axes": ",".join(work.axes), "bytes": str(work.payload), "dtype": work.dtype}
    elif isinstance(work, Transfer):
        notes = {"direction": work.direction, "bytes": str(work.bytes)}
    else:
        notes = {}
    if item.recomputed:
        notes["recomputed"] = "yes"
    return notes
