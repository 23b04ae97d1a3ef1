"""What a rank does, message by message: the programs that are checked. A worker of a pipeline interprets them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Compute:
    """A pass, a part of one between two messages, or the update. ``needs`` are the values that it reads, ``gives``
    those that it makes."""

    name: str
    needs: tuple[str, ...] = ()
    gives: tuple[str, ...] = ()

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class Transfer:
    """One side of a message between two ranks. ``size`` is in bytes, if it is known."""

    sends: bool
    peer: int
    value: str
    size: int = 0

    def __str__(self) -> str:
        size = f"[{self.size}]" if self.size else ""
        return f"send {self.value}{size} > {self.peer}" if self.sends else f"receive {self.value}{size} < {self.peer}"


@dataclass(frozen=True)
class Exchange:
    """Transfers that begin together."""

    transfers: tuple[Transfer, ...]

    def __str__(self) -> str:
        return ", ".join(map(str, self.transfers))


@dataclass(frozen=True)
class Collective:
    """A collective of a group of ranks. ``signature`` is what all its members must agree on: what is done, in which
    dtype, with how many elements."""

    group: tuple[int, ...]
    signature: str
    value: str
    axes: tuple[str, ...] = ()
    """Of the mesh, over which the group goes, if it is of that form. Groups of other axes are others."""

    def __str__(self) -> str:
        over = f"({', '.join(self.axes)})" if self.axes else ",".join(map(str, self.group))
        return f"{self.signature} of {self.value} over {over}"


@dataclass(frozen=True)
class Wait:
    """Until the messages that were begun with a value are done: it has come, or what it was sent from is free."""

    value: str

    def __str__(self) -> str:
        return f"wait {self.value}"


Instruction = Compute | Exchange | Collective | Wait
Program = tuple[Instruction, ...]
"""What one rank does, in order. Messages begin where they stand and go on beside what follows."""


def renumbered(instruction: Instruction, ranks: Sequence[int]) -> Instruction:
    """The same with the rank ``ranks[i]`` in place of ``i``; a rank that is none stays as it is."""

    def new(rank: int) -> int:
        return ranks[rank] if 0 <= rank < len(ranks) else rank

    if isinstance(instruction, Exchange):
        return Exchange(tuple(replace(t, peer=new(t.peer)) for t in instruction.transfers))
    if isinstance(instruction, Collective):
        return replace(instruction, group=tuple(map(new, instruction.group)))
    return instruction
