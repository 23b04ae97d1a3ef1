"""Whether programs of ranks come to an end, whatever the speed of each: unmatched messages, missing waits, deadlocks.

Every rank's instructions are issued in order; messages of a rank go over one stream, one after the other, the strictest
of the orders that libraries keep; the first use of a group waits for all its members, as where communicators are made
when they are first needed. A message is done when both sides, a collective when all members, have reached it. Such
programs are monotone: what can happen does not depend on the order in which it does, so that one execution decides for
all, and what is stuck in it is a cycle of ranks each of which waits for the next.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from meshwright.compiler.schedules.instructions import Collective, Exchange, Instruction, Program, Wait
from meshwright.compiler.schedules.matching import Fault, unmatched, values


def check(programs: Sequence[Program]) -> list[Fault]:
    """All that is wrong with the programs of ranks; empty if they come to an end with what they need."""
    faults = [f for rank, program in enumerate(programs) for f in values(rank, program)]
    faults += unmatched(programs)
    return faults or _Execution(programs).stuck()


Meeting = tuple[object, ...]
"""What ranks must reach together: a message, a collective, or the first use of a group."""


@dataclass
class _Execution:
    """One execution, in which nobody waits without need. ``programs`` have no unmatched messages."""

    programs: Sequence[Program]
    at: list[int] = field(init=False)
    queues: list[list[tuple[Meeting, ...]]] = field(init=False)
    """By rank: the messages that were begun, in order, each as what it needs others for."""

    def __post_init__(self) -> None:
        ranks = len(self.programs)
        self.at = [0] * ranks
        self.queues = [[] for _ in range(ranks)]
        self.heads = [0] * ranks
        self.open: list[set[str]] = [set() for _ in range(ranks)]
        self.values: list[list[tuple[str, ...]]] = [[] for _ in range(ranks)]
        self.used: list[set[object]] = [set() for _ in range(ranks)]
        self.arrived: defaultdict[Meeting, set[int]] = defaultdict(set)
        self.done: set[Meeting] = set()
        self.counts: Counter[tuple[object, ...]] = Counter()
        self.ready = list(range(ranks))

    def stuck(self) -> list[Fault]:
        """The deadlock, as a cycle of ranks; empty if all come to an end."""
        while self.ready:
            rank = self.ready.pop()
            while self._advance(rank):
                pass
        waiting = {r: self._waits(r) for r, p in enumerate(self.programs) if self.at[r] < len(p)}
        waiting |= {r: self._stream(r) for r in range(len(self.programs)) if r not in waiting and self._behind(r)}
        return [_cycle(waiting, self.programs, self.at)] if waiting else []

    def _behind(self, rank: int) -> bool:
        return self.heads[rank] < len(self.queues[rank])

    def _advance(self, rank: int) -> bool:
        """One instruction, or one message of the stream; whether there was anything that could be done."""
        if self._behind(rank):
            meetings = self.queues[rank][self.heads[rank]]
            if self._meet_all(rank, meetings):
                self.open[rank].difference_update(self.values[rank][self.heads[rank]])
                self.heads[rank] += 1
                return True
        if self.at[rank] == len(self.programs[rank]):
            return False
        instruction = self.programs[rank][self.at[rank]]
        if isinstance(instruction, Wait):
            if instruction.value in self.open[rank]:
                return False
        elif isinstance(instruction, (Exchange, Collective)):
            first = self._first(rank, instruction)
            if not self._meet_all(rank, first):
                return False
            self.used[rank].update(meeting[1] for meeting in first)
            self._begin(rank, instruction)
        self.at[rank] += 1
        return True

    def _first(self, rank: int, instruction: Exchange | Collective) -> list[Meeting]:
        """The groups that are used for the first time."""
        if isinstance(instruction, Collective):
            groups = [instruction.group]
        else:
            groups = [tuple(sorted((rank, t.peer))) for t in instruction.transfers]
        return [("first", group) for group in dict.fromkeys(groups) if group not in self.used[rank]]

    def _begin(self, rank: int, instruction: Exchange | Collective) -> None:
        if isinstance(instruction, Collective):
            meetings: list[Meeting] = [(instruction.group, self._number(rank, instruction.group))]
            values: tuple[str, ...] = (instruction.value,)
        else:
            pairs = [(rank, t.peer) if t.sends else (t.peer, rank) for t in instruction.transfers]
            meetings = [(pair, "message", self._number(rank, pair)) for pair in pairs]
            values = tuple(t.value for t in instruction.transfers)
        self.queues[rank].append(tuple(meetings))
        self.values[rank].append(values)
        self.open[rank].update(values)

    def _number(self, rank: int, of: tuple[int, ...]) -> int:
        key = (rank, of)
        self.counts[key] += 1
        return self.counts[key]

    def _meet_all(self, rank: int, meetings: Iterable[Meeting]) -> bool:
        """Whether all of them are complete. The rank comes to every one, even if it waits for another."""
        complete = [self._meet(rank, meeting) for meeting in meetings]
        return all(complete)

    def _meet(self, rank: int, meeting: Meeting) -> bool:
        """Whether all that a meeting needs have come, this rank among them."""
        if meeting in self.done:
            return True
        there = self.arrived[meeting]
        there.add(rank)
        if len(there) < len(self._members(meeting)):
            return False
        self.done.add(meeting)
        self.ready += [other for other in self.arrived.pop(meeting) if other != rank]
        return True

    @staticmethod
    def _members(meeting: Meeting) -> tuple[int, ...]:
        members = meeting[1] if meeting[0] == "first" else meeting[0]
        assert isinstance(members, tuple)
        return members

    def _waits(self, rank: int) -> tuple[str, list[int]]:
        """What a rank's next instruction waits for, and for whom."""
        instruction = self.programs[rank][self.at[rank]]
        if isinstance(instruction, Wait):
            return self._stream(rank)
        assert isinstance(instruction, (Exchange, Collective))
        missing = self._missing(rank, self._first(rank, instruction))
        return f"'{instruction}', the first use of its group", missing

    def _stream(self, rank: int) -> tuple[str, list[int]]:
        """What the message at the head of a rank's stream waits for."""
        values = ", ".join(self.values[rank][self.heads[rank]])
        return f"the message with {values}", self._missing(rank, self.queues[rank][self.heads[rank]])

    def _missing(self, rank: int, meetings: Iterable[Meeting]) -> list[int]:
        return [
            member
            for meeting in meetings
            if meeting not in self.done
            for member in self._members(meeting)
            if member != rank and member not in self.arrived[meeting]
        ]


def _cycle(waiting: dict[int, tuple[str, list[int]]], programs: Sequence[Program], at: Sequence[int]) -> Fault:
    """Follow from any rank whom it waits for, until a rank comes again."""
    path: list[int] = []
    rank = min(waiting)
    while rank not in path:
        path.append(rank)
        rank = next((other for other in waiting[rank][1] if other in waiting), rank)
    path = path[path.index(rank) :]
    lines = []
    for one in path:
        place = _place(programs[one], at[one])
        whom = ", ".join(map(str, waiting[one][1]))
        lines.append(f"rank {one}, at {place}, waits in {waiting[one][0]} for rank {whom}")
    return Fault("deadlock", "; ".join(lines), path[0], at[path[0]])


def _place(program: Program, position: int) -> str:
    instruction: Instruction | None = program[position] if position < len(program) else None
    return f"instruction {position} ({instruction})" if instruction is not None else "its end"
