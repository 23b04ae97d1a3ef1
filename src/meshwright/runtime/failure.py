"""If one rank fails, all stop within seconds and say which, where and why.

The first failure is written to a key of the store through which the ranks have met. A thread of every rank
looks for it, and tells that its rank is alive; so a rank that waits in a collective ends too, and a rank that
died without a word is found by its silence.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass

from meshwright.compiler.diagnostics import Diagnostic, MeshwrightError
from meshwright.runtime.torch_distributed import Store

KEY = "failed"
LAUNCHED = "MESHWRIGHT_LAUNCHED"
"""Set by our launcher, which prints the error itself."""


@dataclass(frozen=True)
class Failure:
    """What is told of the rank that failed: ``text`` is the whole error as it is printed."""

    rank: int
    code: str
    text: str
    told_by: int
    """The rank that wrote this down; another one if the failed rank could not."""


class RankFailed(Exception):
    """A rank of the run has failed; the text is the error that tells which and why, ready to print."""


class CollectiveFailed(RuntimeError):
    """A collective or a message ended with an error, which is mostly the echo of another rank's failure.

    ``call`` says what the rank was doing, ``peer`` to which rank a message went or from which it was to come."""

    def __init__(self, call: str, cause: BaseException, peer: int | None = None) -> None:
        super().__init__(f"{call}{'' if peer is None else f', with rank {peer}'}: {cause}")
        self.peer = peer
        self.timed_out = "timed out" in str(cause).lower() or "timeout" in str(cause).lower()


def died(rank: int, last: str, told_by: int) -> Failure:
    """A rank has ended without telling why."""
    notes = (f"rank {rank} was last seen {last}",) if last else ()
    diagnostic = Diagnostic(
        "E0602",
        f"rank {rank} has died without a word",
        action="see whether it ran out of memory (dmesg, the scheduler's log), then resume from the last checkpoint",
        notes=notes,
    )
    return Failure(rank, "E0602", diagnostic.render(), told_by)


def ended(rank: int, waiting: int, broken: CollectiveFailed) -> Failure:
    """A rank has come to its end, and another one waits for it."""
    diagnostic = Diagnostic(
        "E0602",
        f"rank {rank} has ended, and rank {waiting} still waits for it",
        action=f"see what rank {rank} has told before its end: all ranks must do the same steps",
        notes=(f"rank {waiting} was {broken}",),
    )
    return Failure(rank, "E0602", diagnostic.render(), waiting)


def described(rank: int, where: str, cause: BaseException) -> Failure:
    """The failure of this rank, from the exception that ended it."""
    if isinstance(cause, MeshwrightError):
        return Failure(rank, cause.diagnostics[0].code, str(cause), rank)
    line = _place(cause)
    diagnostic = Diagnostic(
        "E0602",
        f"rank {rank} failed: {type(cause).__name__}: {cause}",
        action="repair what the message names, then resume from the last checkpoint",
        notes=tuple(filter(None, (f"it was {where}" if where else "", f"raised at {line}" if line else ""))),
    )
    return Failure(rank, "E0602", diagnostic.render(), rank)


def _place(cause: BaseException) -> str:
    trace = cause.__traceback__
    if trace is None:
        return ""
    while trace.tb_next is not None:
        trace = trace.tb_next
    return f"{trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}"


class Watch:
    """The thread that tells that this rank lives and looks whether another has failed.

    ``last_call`` gives what the rank communicated last. When another rank has failed, ``stop`` is called with it in the
    thread; by default the process reports and ends at once, since its main thread may wait forever.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        ranks: int,
        *,
        interval: float = 0.5,
        stop: Callable[[Failure], None] | None = None,
    ) -> None:
        self.rank = rank
        self.ranks = ranks
        self.interval = interval
        self.last_call: Callable[[], str] = lambda: "before its first collective"
        self._store = store
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._leaving = threading.Lock()
        self._stop = stop or self.exit
        self._beats = 0
        self._beat()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop watching; the rank has come to its end."""
        self._ended.set()
        self._thread.join()
        with contextlib.suppress(RuntimeError), self._lock:
            self._store.set(f"alive/{self.rank}", json.dumps([-1, "at its end"]))

    def linger(self, seconds: float) -> None:
        """Stay until all other ranks have come to their ends, or for so long: the store may live with this rank."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and self._reachable():
            if all(beats < 0 for rank, (beats, _) in self._alive().items() if rank != self.rank):
                return
            time.sleep(self.interval / 4)

    def tell(self, failure: Failure) -> Failure:
        """Write a failure down for all ranks, unless one is there already; the one that counts is returned."""
        with contextlib.suppress(RuntimeError), self._lock:
            return Failure(**json.loads(self._store.compare_set(KEY, "", json.dumps(asdict(failure)))))
        return failure

    def told(self) -> Failure | None:
        """The failure that a rank has written down, if any. None as well when the store is gone."""
        with contextlib.suppress(RuntimeError), self._lock:
            if self._store.check([KEY]):
                return Failure(**json.loads(self._store.get(KEY)))
        return None

    def cause_of(self, broken: CollectiveFailed) -> Failure:
        """Who is to blame for a collective that failed: a rank that told why, one that is silent, or time."""
        self._ended.set()
        before = self._alive()
        if not self._reachable():
            return self._store_gone()
        deadline = time.monotonic() + 4 * self.interval
        while time.monotonic() < deadline:
            found = self.told()
            if found is not None:
                return found
            time.sleep(self.interval / 4)
            self._beat()
        for rank, (beats, last) in self._alive().items():
            if rank != self.rank and beats >= 0 and before.get(rank, (None, ""))[0] == beats:
                return self.tell(died(rank, last, self.rank))
        for rank, (beats, _) in self._alive().items():
            if rank != self.rank and beats < 0:
                return self.tell(ended(rank, self.rank, broken))
        others = tuple(f"rank {r} was {last}" for r, (_, last) in sorted(self._alive().items()) if r != self.rank)
        what = "waited in vain" if broken.timed_out else "lost its connection"
        if broken.peer is not None:
            what += f" {'for' if broken.timed_out else 'to'} rank {broken.peer}"
        diagnostic = Diagnostic(
            "E0603",
            f"rank {self.rank} {what} {broken}",
            action="see whether a rank is stuck or much slower, or the network is broken",
            notes=others[:16],
        )
        return self.tell(Failure(self.rank, "E0603", diagnostic.render(), self.rank))

    def exit(self, failure: Failure) -> None:
        """Report the failure and end the process at once. The first of two threads that call it counts."""
        self._ended.set()
        if not self._leaving.acquire(blocking=False):
            time.sleep(60)
        report(failure, self.rank)
        # a launcher ends all ranks when the first one ends, and rank 0 often hosts the store: let all hear of it first
        time.sleep(2 * self.interval)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)

    def _run(self) -> None:
        silent = 0
        while not self._ended.wait(self.interval):
            self._beat()
            found = self.told()
            silent = 0 if self._reachable() else silent + 1
            if found is None and silent > 4:
                found = self._store_gone()
            if found is not None and not self._ended.is_set():
                self._stop(found)
                return

    def _reachable(self) -> bool:
        """Whether the store still answers."""
        try:
            with self._lock:
                self._store.check([KEY])
        except RuntimeError:
            return False
        return True

    def _store_gone(self) -> Failure:
        """Without the store nobody can be asked: it lives with rank 0, and rank 1 tells so for the others."""
        return died(0, "as the host of the store at which the ranks meet", 1)

    def _beat(self) -> None:
        self._beats += 1
        with contextlib.suppress(RuntimeError), self._lock:
            self._store.set(f"alive/{self.rank}", json.dumps([self._beats, self.last_call()]))

    def _alive(self) -> Mapping[int, tuple[int, str]]:
        """How often each rank has told that it lives (-1: it has ended well), and what it did last."""
        result = {}
        with contextlib.suppress(RuntimeError), self._lock:
            for rank in range(self.ranks):
                if self._store.check([f"alive/{rank}"]):
                    beats, last = json.loads(self._store.get(f"alive/{rank}"))
                    result[rank] = (int(beats), str(last))
        return result


def report(failure: Failure, rank: int) -> None:
    """Print the one clean error, once for all ranks, and leave it where a launcher looks for it."""
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if file:
        text = {"message": failure.text, "extraInfo": {"timestamp": str(int(time.time())), "rank": failure.rank}}
        with contextlib.suppress(OSError), open(file, "w") as stream:
            json.dump({"message": text}, stream)
    speaker = failure.told_by if failure.rank == 0 else 0
    if rank == speaker and not os.environ.get(LAUNCHED):
        print(failure.text, file=sys.stderr, flush=True)
