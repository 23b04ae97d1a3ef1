"""What the items of a graph occupy: kernels the compute stream, messages the links, transfers stream and host link."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from meshwright.compiler.cluster.cluster import Cluster
from meshwright.compiler.cluster.collectives import message_cost
from meshwright.compiler.cluster.kernels import kernel_seconds
from meshwright.compiler.summary import GraphSummary, Item, Kernel, Message, RankSummary, Wait


@dataclass(frozen=True)
class Run:
    """Kernels that follow each other on the compute stream without anything between them.

    The host issues one kernel every ``launch`` seconds. If it begins at ``h`` and the stream is free at ``c``, the run
    ends at ``max(c + seconds, h + issued)``: ``issued`` is what it takes when the stream waits for the host.
    """

    seconds: float
    issued: float
    issue: float
    """Seconds of the host."""
    kinds: Mapping[str, float]
    """Seconds by kernel kind, recomputation apart."""
    positions: tuple[int, ...] = ()
    """Of the items, in the graph."""


@dataclass(frozen=True)
class Send:
    """A message on the queue of a link class. The compute stream waits at once unless it is ``asynchronous``."""

    position: int
    seconds: float
    queue: str
    axes: str
    asynchronous: bool
    awaited: bool = True
    after: tuple[int, ...] = ()
    """Messages that must be there before, besides what the compute stream has done."""


@dataclass(frozen=True)
class Await:
    """The compute stream waits for the oldest message of an item that nobody has waited for."""

    position: int
    message: int


@dataclass(frozen=True)
class Copy:
    """A transfer over the host link. It runs on the stream that computes, as the runtime's copies do."""

    position: int
    seconds: float
    direction: str


Task = Run | Send | Await | Copy


@dataclass(frozen=True)
class Pricing:
    """The cluster and what has been priced on it so far."""

    cluster: Cluster
    summary: RankSummary
    known: dict[Kernel, float] = field(default_factory=dict)

    def kernel(self, kernel: Kernel) -> float:
        found = self.known.get(kernel)
        if found is None:
            device = self.cluster.device
            works = kernel.parts or (kernel,)
            found = sum(kernel_seconds(device, work) * work.times for work in works)
            if device.is_host and kernel.kind != "view":
                found += kernel.launches * device.efficiency.launch
            self.known[kernel] = found
        return found

    @property
    def launch(self) -> float:
        """Seconds of the host for a kernel; none where launching it is part of running it."""
        return 0.0 if self.cluster.device.is_host else self.cluster.device.efficiency.launch


@dataclass(frozen=True)
class Piece:
    """A kernel at its item: its seconds, its kind in the report."""

    position: int
    seconds: float
    kind: str
    launches: int = 1


Part = Piece | Send | Await | Copy


def parts(graph: GraphSummary, kernels: Mapping[int, Kernel], pricing: Pricing) -> dict[int, Part]:
    """What the items occupy, by position; views are left out. ``kernels`` are those that are launched (see
    :mod:`fusion`)."""
    waited = {item.work.message for item in graph.items if isinstance(item.work, Wait)}
    found: dict[int, Part] = {}
    for position, item in enumerate(graph.items):
        work = item.work
        if isinstance(work, Kernel):
            kernel = kernels.get(position)
            if kernel is not None:
                kind = "recomputed" if item.recomputed else kernel.kind
                found[position] = Piece(position, pricing.kernel(kernel), kind, kernel.launches)
        elif isinstance(work, Message):
            found[position] = _send(position, item, work, graph.items, position in waited, pricing)
        elif isinstance(work, Wait):
            found[position] = Await(position, work.message)
        else:
            found[position] = Copy(position, work.bytes / pricing.cluster.device.host_link, work.direction)
    return found


def _send(position: int, item: Item, work: Message, items: Sequence[Item], awaited: bool, pricing: Pricing) -> Send:
    mesh = pricing.summary.mesh
    cost = message_cost(pricing.cluster, mesh, work.axes, work.kind, work.payload)
    after = tuple(
        r for r in item.reads if r >= 0 and isinstance(before := items[r].work, Message) and before.asynchronous
    )
    return Send(position, cost.seconds / work.shared, cost.tier, ",".join(work.axes), work.asynchronous, awaited, after)


def coalesce(sequence: Sequence[Part], launch: float, *, whole: bool = True) -> list[Task]:
    """The tasks of a sequence; kernels without anything between them are one run (each its own unless ``whole``)."""
    tasks: list[Task] = []
    run: list[Piece] = []
    for part in sequence:
        if isinstance(part, Piece):
            run.append(part)
            if whole:
                continue
        if run:
            tasks.append(_run(run, launch))
            run = []
        if not isinstance(part, Piece):
            tasks.append(part)
    if run:
        tasks.append(_run(run, launch))
    return tasks


def _run(pieces: Sequence[Piece], launch: float) -> Run:
    seconds = issue = issued = 0.0
    kinds: dict[str, float] = {}
    for piece in pieces:
        issue += launch * piece.launches
        issued = max(issued, issue) + piece.seconds
        seconds += piece.seconds
        kinds[piece.kind] = kinds.get(piece.kind, 0.0) + piece.seconds
    return Run(seconds, issued, issue, kinds, tuple(p.position for p in pieces))
