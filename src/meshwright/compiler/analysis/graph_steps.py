"""What a graph does with other ranks: its collectives, what is waited for, and what each of them is computed from."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from torch import fx

from meshwright.compiler.analysis.calls import Call, Event, asked
from meshwright.compiler.graph import collectives
from meshwright.compiler.graph.meeting import meets
from meshwright.compiler.graph.rank_program import LocalGraph
from meshwright.compiler.mesh import Mesh


@dataclass(frozen=True)
class Step:
    """A collective that begins, or, without a ``signature``, is waited for."""

    value: str
    """Names it within the graph."""
    signature: str = ""
    axes: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    """Collectives whose results it is computed from, and nothing before it."""


@dataclass(frozen=True)
class Steps:
    """What a graph does each time that it runs."""

    steps: tuple[Step, ...]
    last: tuple[str, ...]
    """Collectives whose results only the outputs are computed from."""


def steps_of(graph: LocalGraph, mesh: Mesh, order: Iterable[fx.Node] | None = None) -> Steps:
    """The steps of a graph, whose nodes run in ``order`` (default: its own). The mesh has the axis ``micro``."""
    reader = _Reader()
    for node in graph.module.graph.nodes if order is None else order:
        if node.op == "call_function":
            reader.call(node, mesh)
    (output,) = graph.module.graph.find_nodes(op="output")
    return Steps(tuple(reader.steps), reader.needs(reader.sources(output)))


def steps_in_rounds(graph: LocalGraph, mesh: Mesh) -> tuple[tuple[Steps, ...], tuple[Steps, ...]]:
    """The steps of each microbatch in each of its rounds, and of the meetings between them; see :mod:`meeting`."""
    reader = _Reader()
    rounds: list[Steps] = []
    meetings: list[Steps] = []
    for node in graph.module.graph.nodes:
        if meets(node):
            rounds.append(reader.taken())
            meetings.append(steps_from(asked(node, mesh)))
        elif node.op == "call_function":
            reader.call(node, mesh)
    (output,) = graph.module.graph.find_nodes(op="output")
    last = reader.needs(reader.sources(output))
    rounds.append(replace(reader.taken(), last=last))
    return tuple(rounds), tuple(meetings)


def steps_after_meetings(graph: LocalGraph, mesh: Mesh) -> tuple[Steps, Steps]:
    """The steps of the meetings that a pass begins with, once for all microbatches, and those of each microbatch."""
    together, each = _Reader(), _Reader()
    for node in graph.module.graph.nodes:
        if meets(node):
            together.steps += together.read(node.name, asked(node, mesh), 0)
        elif node.op == "call_function":
            each.call(node, mesh)
    (output,) = graph.module.graph.find_nodes(op="output")
    return Steps(tuple(together.steps), tuple(together.names)), Steps(
        tuple(each.steps), each.needs(each.sources(output))
    )


def steps_from(events: Sequence[Event]) -> Steps:
    """The steps of something else that communicates; its collectives are numbered."""
    reader = _Reader()
    return Steps((*reader.read("", events, 0),), tuple(reader.names))


class _Reader:
    """Goes through the nodes of a graph. Sets of collectives are bits of a number."""

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self.names: list[str] = []
        self._made_of: dict[fx.Node, int] = {}
        self._begun: dict[fx.Node, int] = {}
        self._needed = 0

    def taken(self) -> Steps:
        """The steps since the last that were taken."""
        found, self.steps = Steps(tuple(self.steps), ()), []
        return found

    def sources(self, node: fx.Node) -> int:
        """The collectives that what a node reads is computed from."""
        found = 0
        for source in node.all_input_nodes:
            found |= self._made_of.get(source, 0)
        return found

    def needs(self, wanted: int) -> tuple[str, ...]:
        """Those of them that nothing has needed so far."""
        fresh = wanted & ~self._needed
        self._needed |= fresh
        return tuple(self.names[number] for number in _bits(fresh))

    def call(self, node: fx.Node, mesh: Mesh) -> None:
        wanted = self.sources(node)
        if node.target is collectives.wait:
            begun = self._begun.get(node.all_input_nodes[0], 0)
            self.steps += [Step(self.names[number]) for number in _bits(begun)]
            self._made_of[node] = begun or wanted
            return
        before = len(self.names)
        events = asked(node, mesh)
        if events:
            self.steps += self.read(node.name, events, wanted)
            wanted = (1 << len(self.names)) - (1 << before)
            if node.target in collectives.BEGINS:
                self._begun[node] = wanted
        self._made_of[node] = wanted

    def read(self, name: str, events: Sequence[Event], wanted: int) -> Iterator[Step]:
        """The steps of events that belong together; what of them was waited for, later ones are computed from."""
        first = len(self.names)
        alone = sum(isinstance(event, Call) for event in events) == 1
        for event in events:
            if isinstance(event, Call):
                needs = self.needs(wanted)
                self.names.append(name if alone else f"{name}.{len(self.names) - first}".lstrip("."))
                yield Step(self.names[-1], str(event), event.axes, needs)
            else:
                yield Step(self.names[first + event])
                wanted |= 1 << first + event


def _bits(numbers: int) -> Iterator[int]:
    while numbers:
        low = numbers & -numbers
        yield low.bit_length() - 1
        numbers ^= low
