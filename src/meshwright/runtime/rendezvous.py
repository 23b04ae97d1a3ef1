"""Where the threads of the virtual cluster meet: one exchange of tensors per collective.

All members of a group deposit their tensor and a note of their call, the last one wakes the others,
everyone reads what it needs, and nobody leaves before all have read, so that a tensor may be
overwritten as soon as its collective has returned. Messages from one rank to another are copied when they are sent.
Calls that differ, ranks that wait for each other and ranks that fail end all waiting at once.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from torch import Tensor

from meshwright.compiler.diagnostics import MeshwrightError, error

T = TypeVar("T")


@dataclass(frozen=True)
class Call:
    """What a rank asks for; equal for all members of a group."""

    name: str
    axes: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str

    def __str__(self) -> str:
        return f"{self.name} of {self.dtype.removeprefix('torch.')}{list(self.shape)} over ({', '.join(self.axes)})"


def mismatch(first: int, first_call: object, second: int, second_call: object) -> MeshwrightError:
    """E0604: two ranks of one group have called different collectives; told in the order of ranks."""
    if first > second:
        first, first_call, second, second_call = second, second_call, first, first_call
    return error(
        "E0604",
        f"rank {first} calls {first_call}, but rank {second} calls {second_call}",
        action="the ranks' programs differ: compile again, and run the same build on every rank",
    )


class Aborted(Exception):
    """Raised in the ranks that wait when another rank has failed."""


@dataclass(frozen=True)
class _Address:
    """What a message between two ranks is known by."""

    source: int
    target: int
    name: str


@dataclass
class _Meeting:
    group: tuple[int, ...]
    calls: dict[int, Call] = field(default_factory=dict)
    tensors: dict[int, Tensor] = field(default_factory=dict)
    reading: int = 0
    full: bool = False


class Rendezvous:
    """The meetings of all groups of a cluster of ``ranks`` threads."""

    def __init__(self, ranks: int) -> None:
        self._changed = threading.Condition()
        self._meetings: dict[tuple[int, ...], _Meeting] = {}
        self._letters: dict[_Address, list[list[Tensor]]] = {}
        self._waiting: dict[int, _Meeting | _Address] = {}
        self._running = ranks
        self.failure: tuple[int, BaseException] | None = None
        """The first rank that failed, and how."""

    def exchange(
        self, rank: int, group: tuple[int, ...], call: Call, tensor: Tensor, read: Callable[[list[Tensor]], T]
    ) -> T:
        """Deposit ``tensor`` and return ``read`` of all members' tensors, in the order of the group."""
        meeting = self._arrive(rank, group, call, tensor)
        try:
            return read([meeting.tensors[member] for member in group])
        finally:
            with self._changed:
                meeting.reading -= 1
                self._changed.notify_all()
                while meeting.reading and self.failure is None:
                    self._changed.wait()

    def send(self, rank: int, target: int, name: str, tensors: Sequence[Tensor]) -> None:
        """Hand copies of tensors to another rank, which need not ask for them yet."""
        address = _Address(rank, target, name)
        with self._changed:
            self._letters.setdefault(address, []).append([t.clone() for t in tensors])
            if self._waiting.get(target) == address:
                del self._waiting[target]
            self._changed.notify_all()

    def receive(self, rank: int, source: int, name: str) -> list[Tensor]:
        """What another rank has sent, or will send, under a name."""
        address = _Address(source, rank, name)
        with self._changed:
            while not self._letters.get(address):
                if self.failure is not None:
                    raise Aborted
                self._waiting[rank] = address
                self._check_progress()
                if self.failure is None:
                    self._changed.wait()
            return self._letters[address].pop(0)

    def finish(self, rank: int) -> None:
        """A rank has come to the end of its program."""
        with self._changed:
            self._running -= 1
            self._check_progress()

    def fail(self, rank: int, failure: BaseException) -> None:
        """A rank has failed: everyone who waits, or will, is told."""
        with self._changed:
            self._fail(rank, failure)

    def _fail(self, rank: int, failure: BaseException) -> None:
        if self.failure is None and not isinstance(failure, Aborted):
            self.failure = (rank, failure)
        self._changed.notify_all()

    def _arrive(self, rank: int, group: tuple[int, ...], call: Call, tensor: Tensor) -> _Meeting:
        with self._changed:
            if self.failure is not None:
                raise Aborted
            meeting = self._meetings.setdefault(tuple(sorted(group)), _Meeting(group))
            for other, other_call in meeting.calls.items():
                if other_call != call:
                    self._fail(rank, mismatch(other, other_call, rank, call))
                    raise Aborted
            meeting.calls[rank] = call
            meeting.tensors[rank] = tensor
            if len(meeting.calls) == len(group):
                del self._meetings[tuple(sorted(group))]
                meeting.reading = len(group)
                meeting.full = True
                for member in group:
                    self._waiting.pop(member, None)
                self._changed.notify_all()
                return meeting
            self._waiting[rank] = meeting
            self._check_progress()
            while not meeting.full and self.failure is None:
                self._changed.wait()
            if self.failure is not None:
                raise Aborted
            return meeting

    def _check_progress(self) -> None:
        """Everyone who still runs waits for somebody who will not come: say who waits for what."""
        if not self._waiting or len(self._waiting) < self._running or self.failure is not None:
            return
        lines = [f"rank {r} waits {_for(r, what)}" for r, what in sorted(self._waiting.items())]
        rank = min(self._waiting)
        self._fail(
            rank,
            error(
                "E0604",
                "the ranks wait for each other and none can go on",
                notes=lines,
                action="the ranks' programs differ: compile again, and run the same build on every rank",
            ),
        )


def _for(rank: int, what: _Meeting | _Address) -> str:
    """What a rank waits for."""
    if isinstance(what, _Address):
        return f"for {what.name} of rank {what.source}"
    return f"in {what.calls[rank]} for {_absent(what)}"


def _absent(meeting: _Meeting) -> str:
    missing = [str(r) for r in meeting.group if r not in meeting.calls]
    return f"rank{'s' * (len(missing) > 1)} {', '.join(missing)}"
