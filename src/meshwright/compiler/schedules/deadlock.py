"""Whether programs of ranks come to an end, whatever the speed of each: unmatched messages, missing waits, deadlocks.

Every rank's instructions are issued in order; messages of a rank go over one stream, one after the other, the strictest
of the orders that libraries keep; the first use of a group waits for all its members, as where communicators are made
when they are first needed. A message is done when both sides, a collective when all members, have reached it. Such
programs are monotone: what can happen does not depend on the order in which it does, so that one execution decides for
all, and what is stuck in it is a cycle of ranks each of which waits for the next.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from meshwright.compiler.schedules.instructions import Collective, Exchange, Program, Wait, renumbered
from meshwright.compiler.schedules.matching import Fault, unmatched, values
from meshwright.compiler.schedules.symmetry import RankPrograms


def check(programs: Sequence[Program], ranks: Sequence[int] | None = None) -> list[Fault]:
    """All that is wrong with the programs of ranks; empty if they come to an end with what they need. ``ranks``: the
    numbers by which faults call the ranks, if they are not simply counted."""
    names = range(len(programs)) if ranks is None else ranks
    faults = [f for rank, program in enumerate(programs) for f in values(rank, program, names)]
    faults += unmatched(programs, names)
    return faults or _Execution(programs, names).stuck()


def check_ranks(programs: RankPrograms) -> list[Fault]:
    """The same for all ranks of a mesh; those that do the same are looked at once (why that is enough, is said at
    :class:`~meshwright.compiler.schedules.symmetry.RankPrograms`)."""
    return check(programs.programs, programs.first)


_Use = tuple[Hashable, Hashable, tuple[int, ...]]
"""What a message or a collective is counted by, the communicator that it uses, and its members."""
_ISSUE = -1
"""What a host does: hand the next message to the stream. From 0 on: wait until the stream is done with the message of
that number. Less than -1: come to the meeting ``-2 - number``."""


class _Execution:
    """One execution, in which nobody waits without need. The programs have no faults that are seen without one.

    A *meeting* is what ranks must reach together: a message, a collective, or the first use of a group. Every rank has
    a host, which goes through the program, and a stream, which goes through the messages that the host hands to it.
    """

    def __init__(self, programs: Sequence[Program], ranks: Sequence[int]) -> None:
        self.programs, self.ranks = programs, ranks
        self.meetings: dict[Hashable, int] = {}
        self.members: list[tuple[int, ...]] = []
        self.left: list[int] = []
        """By meeting, how many have not come."""
        self.hosts: list[list[int]] = []
        self.host_places: list[list[int]] = []
        self.streams: list[list[tuple[int, ...]]] = []
        self.stream_places: list[list[int]] = []
        """By rank, and what its host or its stream does: the position of the instruction."""
        for rank, program in enumerate(programs):
            self._read(rank, program)
        count = len(programs)
        self.at, self.heads, self.issued = [0] * count, [0] * count, [0] * count
        self.host_came, self.stream_came = [False] * count, [False] * count
        """By rank: whether it has come to the meetings before which its host, or its stream, stands."""
        self.ready = list(range(count))

    def stuck(self) -> list[Fault]:
        """The deadlock, as a cycle of ranks; empty if all come to an end."""
        while self.ready:
            self._go_on(self.ready.pop())
        over = [self.at[r] == len(self.hosts[r]) and not self._behind(r) for r in range(len(self.programs))]
        waiting = {rank: self._waits(rank) for rank, done in enumerate(over) if not done}
        return [self._cycle(waiting)] if waiting else []

    def _read(self, rank: int, program: Program) -> None:
        """What the host and the stream of a rank do."""
        host: list[int] = []
        stream: list[tuple[int, ...]] = []
        host_places: list[int] = []
        stream_places: list[int] = []
        latest: dict[str, int] = {}
        counts: dict[Hashable, int] = {}
        for position, instruction in enumerate(program):
            kind = type(instruction)
            if kind is Wait:
                assert isinstance(instruction, Wait)
                host.append(latest[instruction.value])
                host_places.append(position)
                continue
            if kind is Collective:
                assert isinstance(instruction, Collective)
                communicator = (instruction.group, instruction.axes)
                uses: tuple[_Use, ...] = ((communicator, communicator, instruction.group),)
                latest[instruction.value] = len(stream)
            elif kind is Exchange:
                assert isinstance(instruction, Exchange)
                uses = tuple([_use(rank, t.peer, t.sends) for t in instruction.transfers])
                for t in instruction.transfers:
                    latest[t.value] = len(stream)
            else:
                continue
            found = []
            for what, group, members in uses:
                number = counts.get(what, 0)
                counts[what] = number + 1
                first = ("first", group)
                if first not in counts:
                    counts[first] = 1
                    host.append(-2 - self._meeting(first, members))
                    host_places.append(position)
                found.append(self._meeting((what, number), members))
            host.append(_ISSUE)
            host_places.append(position)
            stream.append(tuple(found))
            stream_places.append(position)
        self.hosts.append(host)
        self.host_places.append(host_places)
        self.streams.append(stream)
        self.stream_places.append(stream_places)

    def _meeting(self, what: Hashable, members: tuple[int, ...]) -> int:
        found = self.meetings.setdefault(what, len(self.left))
        if found == len(self.left):
            self.left.append(len(members))
            self.members.append(members)
        return found

    def _go_on(self, rank: int) -> None:
        """Let a rank do all that it can."""
        host, stream = self.hosts[rank], self.streams[rank]
        while True:
            while self.heads[rank] < self.issued[rank]:
                meetings = stream[self.heads[rank]]
                if not self.stream_came[rank]:
                    self.stream_came[rank] = True
                    self._come(rank, meetings)
                if any(self.left[m] for m in meetings):
                    break
                self.stream_came[rank] = False
                self.heads[rank] += 1
            if self.at[rank] == len(host):
                return
            code = host[self.at[rank]]
            if code >= 0:
                if self.heads[rank] <= code:
                    return
            elif code == _ISSUE:
                self.issued[rank] += 1
            else:
                if not self.host_came[rank]:
                    self.host_came[rank] = True
                    self._come(rank, (-2 - code,))
                if self.left[-2 - code]:
                    return
                self.host_came[rank] = False
            self.at[rank] += 1

    def _come(self, rank: int, meetings: Iterable[int]) -> None:
        for meeting in meetings:
            self.left[meeting] -= 1
            if not self.left[meeting]:
                self.ready += [other for other in self.members[meeting] if other != rank]

    def _behind(self, rank: int) -> bool:
        return self.heads[rank] < self.issued[rank]

    def _waits(self, rank: int) -> _Waiting:
        """What a rank that cannot go on waits in."""
        at, head = self.at[rank], self.heads[rank]
        if at < len(self.hosts[rank]) and self.hosts[rank][at] < 0:
            return _Waiting(self.host_places[rank][at], frozenset((-2 - self.hosts[rank][at],)))
        missing = frozenset(m for m in self.streams[rank][head] if self.left[m])
        return _Waiting(self.stream_places[rank][head], missing)

    def _absent(self, waiting: Mapping[int, _Waiting], one: int) -> list[int]:
        """For whom a rank waits: those that have not come. Whoever has waits there too."""
        meetings = sorted(waiting[one].meetings)
        return [
            member
            for meeting in meetings
            for member in self.members[meeting]
            if member not in waiting or meeting not in waiting[member].meetings
        ]

    def _cycle(self, waiting: Mapping[int, _Waiting]) -> Fault:
        """Follow from any rank whom it waits for, until a rank comes again."""
        path: list[int] = []
        rank = min(waiting)
        while rank not in path:
            path.append(rank)
            rank = next((other for other in self._absent(waiting, rank) if other in waiting), rank)
        path = path[path.index(rank) :]
        message = "; ".join(self._told(one, waiting) for one in path)
        return Fault("deadlock", message, self.ranks[path[0]], self._position(path[0]))

    def _told(self, one: int, waiting: Mapping[int, _Waiting]) -> str:
        position, inside = self._position(one), waiting[one].position
        where = self._instruction(one, position)
        if position != inside:
            where += f", waits in {self._instruction(one, inside)}"
        else:
            where += ", the first use of its group, waits"  # where a host stands at what it waits in
        whom = sorted({self.ranks[other] for other in self._absent(waiting, one)})
        return f"rank {self.ranks[one]}, at {where} for rank {', '.join(map(str, whom))}"

    def _position(self, rank: int) -> int:
        """Where the host of a rank stands."""
        at = self.at[rank]
        return self.host_places[rank][at] if at < len(self.hosts[rank]) else len(self.programs[rank])

    def _instruction(self, rank: int, position: int) -> str:
        if position == len(self.programs[rank]):
            return "its end"
        return f"instruction {position} ({renumbered(self.programs[rank][position], self.ranks)})"


@dataclass(frozen=True)
class _Waiting:
    """The instruction that a rank waits in, and what it needs that is incomplete."""

    position: int
    meetings: frozenset[int]


def _use(rank: int, peer: int, sends: bool) -> _Use:
    pair = (rank, peer) if rank < peer else (peer, rank)
    return (rank, peer, sends) if sends else (peer, rank, True), pair, pair
