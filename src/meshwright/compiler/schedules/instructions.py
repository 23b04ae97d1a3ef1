"""What a rank of a pipeline does, message by message: the program that is checked, and that a worker interprets."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Compute:
    """A pass, or the update. ``needs`` are the values that it reads, ``gives`` those that it makes."""

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
    dtype, with how many elements, from which root."""

    group: tuple[int, ...]
    signature: str
    value: str

    def __str__(self) -> str:
        return f"{self.signature} of {self.value} over {','.join(map(str, self.group))}"


@dataclass(frozen=True)
class Wait:
    """Until the messages that were begun with a value are done: it has come, or what it was sent from is free."""

    value: str

    def __str__(self) -> str:
        return f"wait {self.value}"


Instruction = Compute | Exchange | Collective | Wait
Program = tuple[Instruction, ...]
"""What one rank does, in order. Messages begin where they stand and go on beside what follows."""
