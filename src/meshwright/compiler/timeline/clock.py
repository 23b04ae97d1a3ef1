"""When everything runs: the compute stream, the host that issues kernels, and a queue for every kind of link.

The compute stream works in the order of the program. A message is given to its queue when the stream comes to it (as
with ``torch.distributed``, whose messages wait for all kernels before them), takes its turn there, and is waited for at
once or where the program says. So what overlaps follows from the program; two messages on one kind of link never do.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from meshwright.compiler.timeline.tasks import Await, Copy, Run, Send, Task

LAUNCH, TRANSFER, CONTENTION = "launch", "transfer", "contention"
State = tuple[object, ...]


@dataclass
class Clock:
    """The time on every resource. ``now`` is that of the compute stream; everything it does adds up to it."""

    launch: float
    contention: float = 0.0
    """How much longer kernels take while messages are on the links."""
    now: float = 0.0
    host: float = 0.0
    free: dict[str, float] = field(default_factory=dict)
    """By queue: when it has done all that it was given."""
    flying: dict[int, deque[tuple[float, str]]] = field(default_factory=dict)
    """By item: the ends of its messages that nobody has waited for, and their axes."""
    ended: dict[int, float] = field(default_factory=dict)
    """By item: the end of its last message."""
    spent: defaultdict[tuple[str, str], float] = field(default_factory=lambda: defaultdict(float))
    """Seconds by ``("compute", kind)``, ``("exposed", axes)``, ``("communication", axes)``, ``("other", cause)``."""
    last: tuple[str, str] = ("other", LAUNCH)
    observe: Callable[[Task, float, float], None] | None = None
    """Told of every task with its start and end."""

    def play(self, tasks: Iterable[Task]) -> None:
        """Run tasks in order."""
        for task in tasks:
            if isinstance(task, Run):
                self._run(task)
            elif isinstance(task, Send):
                self._send(task)
            elif isinstance(task, Await):
                self._await(task)
            else:
                self._copy(task)

    def replay(self, tasks: Sequence[Task], times: int, *, exact: bool = False) -> None:
        """Run tasks several times; as soon as a round leaves every resource as the round before did, all further rounds
        take the same time and are added up (not if ``exact``)."""
        self.repeat(lambda: self.play(tasks), times, exact=exact)

    def repeat(self, once: Callable[[], None], times: int, *, exact: bool = False) -> None:
        """Like :meth:`replay`, for anything that runs tasks."""
        before = self._state()
        for done in range(1, times + 1):
            now, host, spent = self.now, self.host, self.spent.copy()
            once()
            after = self._state()
            stalled = self.spent["other", LAUNCH] > spent.get(("other", LAUNCH), 0.0)
            if not exact and done < times and self._steady(before, after, host - now, stalled):
                self._skip(times - done, now, host, spent)
                return
            before = after

    def finish(self) -> None:
        """Wait for all messages; the host, which reads a result, waits for the stream."""
        self._wait(max(self.free.values(), default=0.0), self.last)
        self.flying.clear()
        self._wait(self.host, ("other", LAUNCH))
        self.host = self.now

    def _run(self, run: Run) -> None:
        start = self.now
        work = self._slowed(start, run.seconds)
        end = max(start + work, self.host + run.issued)
        self.host += run.issue
        for kind, seconds in run.kinds.items():
            self.spent["compute", kind] += seconds
        if work > run.seconds:
            self.spent["other", CONTENTION] += work - run.seconds
        if end > start + work:
            self.spent["other", LAUNCH] += end - start - work
        self.now = end
        if self.observe is not None:
            self.observe(run, max(start, end - work), end)

    def _slowed(self, start: float, seconds: float) -> float:
        """The time that kernels take which run beside what is on the links."""
        if not self.contention:
            return seconds
        beside = max(0.0, max(self.free.values(), default=0.0) - start)
        done = beside / (1 + self.contention)
        return seconds * (1 + self.contention) if seconds <= done else beside + seconds - done

    def _send(self, send: Send) -> None:
        self.host += self.launch
        ready = max(self.now, self.host, *(self.ended.get(m, 0.0) for m in send.after))
        start = max(ready, self.free.get(send.queue, 0.0))
        end = start + send.seconds
        self.free[send.queue] = self.ended[send.position] = end
        self.spent["communication", send.axes] += send.seconds
        self.last = ("exposed", send.axes)
        if self.observe is not None:
            self.observe(send, start, end)
        if not send.asynchronous:
            if self.host > self.now:
                self._wait(self.host, ("other", LAUNCH))
            self._wait(end, self.last)
        elif send.awaited:
            self.flying.setdefault(send.position, deque()).append((end, send.axes))

    def _copy(self, copy: Copy) -> None:
        self.host += self.launch
        self._wait(self.host, ("other", LAUNCH))
        start = self.now
        self._wait(start + copy.seconds, ("other", TRANSFER))
        if self.observe is not None:
            self.observe(copy, start, self.now)

    def _await(self, wait: Await) -> None:
        start = self.now
        queue = self.flying.get(wait.message)
        if queue:
            end, axes = queue.popleft()
            self._wait(end, ("exposed", axes))
        if self.observe is not None:
            self.observe(wait, start, self.now)

    def _wait(self, end: float, cause: tuple[str, str]) -> None:
        if end > self.now:
            self.spent[cause] += end - self.now
            self.now = end

    def _state(self) -> State:
        """How far ahead everything but the host is of the compute stream."""
        now = self.now
        return (
            tuple(max(0.0, end - now) for _, end in sorted(self.free.items())),
            tuple(
                (p, tuple(max(0.0, end - now) for end, _ in ends)) for p, ends in sorted(self.flying.items()) if ends
            ),
        )

    def _steady(self, before: State, after: State, lead: float, stalled: bool) -> bool:
        """Whether the next round will take as long as the last one. A host that gets further and further ahead, without
        the stream having waited for it, will not hold it up later either."""
        ahead = self.host - self.now
        scale = 1e-12 * max(1.0, abs(self.now))
        host = abs(ahead - lead) <= scale or (ahead < lead and not stalled)
        return host and _alike(before, after, scale)

    def _skip(self, rounds: int, now: float, host: float, spent: Mapping[tuple[str, str], float]) -> None:
        """As if the round since then had come so many times more."""
        ahead = (self.now - now) * rounds
        for key, seconds in self.spent.items():
            self.spent[key] = seconds + (seconds - spent.get(key, 0.0)) * rounds
        self.now += ahead
        self.host += (self.host - host) * rounds
        self.free = {queue: end + ahead for queue, end in self.free.items()}
        self.ended = {message: end + ahead for message, end in self.ended.items()}
        self.flying = {m: deque((end + ahead, axes) for end, axes in ends) for m, ends in self.flying.items()}


def _alike(one: object, other: object, scale: float) -> bool:
    if isinstance(one, tuple) and isinstance(other, tuple):
        return len(one) == len(other) and all(_alike(a, b, scale) for a, b in zip(one, other, strict=True))
    if isinstance(one, float) and isinstance(other, float):
        return abs(one - other) <= scale
    return one == other
