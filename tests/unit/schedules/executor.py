"""Runs programs of ranks in a random order with random delays, with channels that hold as much as one likes. It knows
nothing of how programs are checked."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from meshwright.compiler.schedules.instructions import Collective, Compute, Exchange, Program, Wait


@dataclass
class _Part:
    """One rank's side of a message or collective."""

    channel: tuple[object, ...]
    members: tuple[int, ...]
    number: int
    content: object
    sends: bool = False
    receives: bool = False


@dataclass
class _Operation:
    values: tuple[str, ...]
    parts: list[_Part]
    started: bool = False


@dataclass
class _Rank:
    program: list[Exchange | Collective | Wait]
    at: int = 0
    queue: list[_Operation] = field(default_factory=list)
    open: defaultdict[str, int] = field(default_factory=lambda: defaultdict(int))
    counts: defaultdict[object, int] = field(default_factory=lambda: defaultdict(int))
    groups: set[object] = field(default_factory=set)


class Executor:
    """``capacity``: how many messages a channel between two ranks holds that have been sent and not received (0: a
    sender waits for the receiver). ``serial``: a rank has one message under way at a time. ``lazy``: the first use of a
    group waits for all of it."""

    def __init__(
        self, programs: Sequence[Program], seed: int, capacity: int = 0, serial: bool = True, lazy: bool = True
    ) -> None:
        self.choose = random.Random(seed)
        self.capacity, self.serial, self.lazy = capacity, serial, lazy
        self.ranks = [_Rank([i for i in program if not isinstance(i, Compute)]) for program in programs]
        self.started: defaultdict[object, list[object]] = defaultdict(list)
        """By channel and side, what has been begun there."""
        self.came: defaultdict[object, set[int]] = defaultdict(set)
        self.delays = [self.choose.choice((0.0, 0.3, 0.9)) for _ in programs]

    def run(self) -> bool:
        """Whether all ranks come to an end. Raises AssertionError if something is received that was not expected."""
        actors = [(rank, host) for rank in range(len(self.ranks)) for host in (True, False)]
        while True:
            self.choose.shuffle(actors)
            moved, skipped = False, False
            for rank, host in actors:
                if self.choose.random() < self.delays[rank]:
                    skipped = True
                    continue
                act = self._host if host else self._stream
                for _ in range(self.choose.randint(1, 8)):
                    if not act(rank):
                        break
                    moved = True
            if not moved and not skipped:
                return all(r.at == len(r.program) and not r.queue for r in self.ranks)
            if not moved:
                self.delays = [0.0] * len(self.ranks)  # whoever slept wakes

    def _host(self, number: int) -> bool:
        rank = self.ranks[number]
        if rank.at == len(rank.program):
            return False
        instruction = rank.program[rank.at]
        if isinstance(instruction, Wait):
            if rank.open[instruction.value]:
                return False
        else:
            parts = list(self._parts(number, instruction))
            joined = [self._joined(number, part) for part in parts]  # it comes to all, even if it waits for one
            if self.lazy and not all(joined):
                return False
            for part in parts:
                side = (part.channel, number)
                part.number = rank.counts[side]
                rank.counts[side] += 1
            if isinstance(instruction, Collective):
                values: tuple[str, ...] = (instruction.value,)
            else:
                values = tuple(t.value for t in instruction.transfers)
            for value in values:
                rank.open[value] += 1
            rank.queue.append(_Operation(values, parts))
        rank.at += 1
        return True

    def _joined(self, number: int, part: _Part) -> bool:
        group = part.channel if part.channel[0] == "collective" else tuple(sorted(part.members))
        self.came[group].add(number)
        return self.came[group] >= set(part.members)

    @staticmethod
    def _parts(number: int, instruction: Exchange | Collective) -> list[_Part]:
        if isinstance(instruction, Collective):
            channel = ("collective", instruction.group, instruction.axes)
            return [_Part(channel, instruction.group, 0, (instruction.signature, instruction.value))]
        return [
            _Part(
                ("message", number, t.peer) if t.sends else ("message", t.peer, number),
                (number, t.peer),
                0,
                (t.value, t.size),
                sends=t.sends,
                receives=not t.sends,
            )
            for t in instruction.transfers
        ]

    def _stream(self, number: int) -> bool:
        rank = self.ranks[number]
        moved = False
        for operation in rank.queue[:1] if self.serial else list(rank.queue):
            if not operation.started:
                operation.started = moved = True
                for part in operation.parts:
                    begun = self.started[part.channel, number]
                    assert len(begun) == part.number
                    begun.append(part.content)
            if all(self._done(number, part) for part in operation.parts):
                for value in operation.values:
                    rank.open[value] -= 1
                rank.queue.remove(operation)
                moved = True
        return moved

    def _done(self, number: int, part: _Part) -> bool:
        if part.sends:
            (_, _, target) = part.channel
            received = self.started[part.channel, target]
            if len(received) <= part.number < len(received) + self.capacity:
                return True
        for member in part.members:
            begun = self.started[part.channel, member]
            if len(begun) <= part.number:
                return False
            assert begun[part.number] == part.content, f"{begun[part.number]} and {part.content}"
        return True
