"""Ranks of the virtual cluster that compute one after another, and meet as ever.

What they keep beside their tensors may then be in one place for all, and what a collective makes of the tensors of a
group is seen by the rank that makes it: an all-gather moves what is kept, a sum joins it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from torch import Tensor

from meshwright.runtime.rendezvous import Call, Rendezvous

T = TypeVar("T")


class OneAtATime(Rendezvous):
    """A rendezvous of ranks of which one computes at a time, within :meth:`turn`."""

    def __init__(self, ranks: int) -> None:
        super().__init__(ranks)
        self._turn = threading.Lock()

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Within, no other rank computes, but while this one waits."""
        with self._turn:
            yield

    @contextmanager
    def _waiting_for_others(self) -> Iterator[None]:
        self._turn.release()
        try:
            yield
        finally:
            self._turn.acquire()

    def exchange(
        self, rank: int, group: tuple[int, ...], call: Call, tensor: Tensor, read: Callable[[list[Tensor]], T]
    ) -> T:
        def alone(tensors: list[Tensor]) -> T:
            with self.turn():
                return read(tensors)

        with self._waiting_for_others():
            return super().exchange(rank, group, call, tensor, alone)

    def receive(self, rank: int, source: int, name: str) -> list[Tensor]:
        with self._waiting_for_others():
            return super().receive(rank, source, name)
