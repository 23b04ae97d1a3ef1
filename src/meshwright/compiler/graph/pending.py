"""Messages that have begun: what a communicator hands back, and the handle that a graph passes on to ``wait``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

from torch import Tensor

Kind = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all"]
"""The collectives that may run beside the computation."""


class Work(Protocol):
    """A message under way. It keeps the memory alive that the message reads and writes."""

    def wait(self) -> Tensor:
        """The result, once it is there. Called once."""
        ...


@dataclass(frozen=True)
class Done:
    """A message that was carried out as it began."""

    result: Tensor

    def wait(self) -> Tensor:
        return self.result


@dataclass(frozen=True)
class Pending:
    """What a ``*_begin`` returns: the messages under way, and how their results become the tensors asked for."""

    works: tuple[Work, ...]
    finish: Callable[[list[Tensor]], list[Tensor]]


class Collectives(Protocol):
    """The collectives of a communicator that may be begun."""

    def all_reduce(self, x: Tensor, axes: tuple[str, ...], reduction: str) -> Tensor: ...

    def all_gather(self, x: Tensor, axes: tuple[str, ...]) -> Tensor: ...

    def reduce_scatter(self, x: Tensor, axes: tuple[str, ...]) -> Tensor: ...

    def all_to_all(self, x: Tensor, axes: tuple[str, ...]) -> Tensor: ...


def at_once(here: Collectives, kind: Kind, x: Tensor, axes: tuple[str, ...], reduction: str = "sum") -> Work:
    """``begin`` for a communicator that does everything as it is asked for."""
    if kind == "all_reduce":
        return Done(here.all_reduce(x, axes, reduction))
    if kind == "all_to_all":
        return Done(here.all_to_all(x, axes))
    return Done(here.all_gather(x, axes) if kind == "all_gather" else here.reduce_scatter(x, axes))
