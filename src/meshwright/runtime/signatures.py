"""The check that all ranks of a group call the same collective (``MESHWRIGHT_CHECK=1``).

All ranks run one program, so the n-th collective of a rank and of any member of its group must be the same call. Before
each one a rank writes its call to the store and reads those of the others, so that a difference is an error that
names both calls and never a hang. It costs a few store accesses per collective.
"""

from __future__ import annotations

import json
from datetime import timedelta

from meshwright.compiler.diagnostics import error
from meshwright.runtime.rendezvous import Call, mismatch
from meshwright.runtime.torch_distributed import Store

VARIABLE = "MESHWRIGHT_CHECK"
_KEPT = 4096


class SignatureCheck:
    """Give it to a communicator as ``before``. The store must be used by this object alone."""

    def __init__(self, store: Store, rank: int, timeout: timedelta = timedelta(seconds=60)) -> None:
        self._store = store
        self._rank = rank
        self._timeout = timeout
        self._number = 0

    def __call__(self, call: Call, ranks: tuple[int, ...]) -> None:
        """Raises MeshwrightError E0604 if a rank of the group calls something else, E0603 if it does not come."""
        number, self._number = self._number, self._number + 1
        own = json.dumps([str(call), sorted(ranks)])
        self._store.set(f"call/{number}/{self._rank}", own)
        if number >= _KEPT:
            self._store.delete_key(f"call/{number - _KEPT}/{self._rank}")
        for other in ranks:
            if other == self._rank:
                continue
            key = f"call/{number}/{other}"
            try:
                self._store.wait([key], self._timeout)
            except RuntimeError as late:
                raise error(
                    "E0603",
                    f"rank {self._rank} calls {call} as its collective number {number}, but rank {other} has not "
                    f"come to any after {self._timeout.total_seconds():g} s",
                    action="see whether that rank is stuck or much slower",
                ) from late
            theirs = self._store.get(key).decode()
            if theirs != own:
                first, second = sorted([(self._rank, own), (other, theirs)])
                raise mismatch(first[0], _told(first[1]), second[0], _told(second[1]))


def _told(text: str) -> str:
    call, ranks = json.loads(text)
    return f"{call} with ranks {', '.join(map(str, ranks))}"
