"""Messages between single ranks: what is handed over at once begins at once, and goes on beside the computation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.runtime.communicator import ProcessCommunicator, named
from meshwright.runtime.rendezvous import Rendezvous

PACKED = 1 << 20
"""Bytes up to which the tensors of a parcel go as one message: the norms of many gradients, say."""


@dataclass(frozen=True)
class Parcel:
    """Tensors that go to a rank, or buffers for those that come from it. Both sides know it by ``name``."""

    rank: int
    name: str
    tensors: Sequence[Tensor]
    """Contiguous, in an order, of shapes and dtypes that both sides know."""


class Pending(Protocol):
    """A parcel on its way."""

    def wait(self) -> None: ...


class Mail(Protocol):
    """Begins to send and to receive. The parcels of a pair of ranks begin in the same order on both."""

    def begin(self, sends: Sequence[Parcel], receives: Sequence[Parcel]) -> list[Pending]:
        """One for each parcel, those that are sent first."""


class VirtualMail:
    """The mail of a rank of the virtual cluster."""

    def __init__(self, rank: int, rendezvous: Rendezvous) -> None:
        self._rank, self._rendezvous = rank, rendezvous

    def begin(self, sends: Sequence[Parcel], receives: Sequence[Parcel]) -> list[Pending]:
        for parcel in sends:
            self._rendezvous.send(self._rank, parcel.rank, parcel.name, parcel.tensors)
        return [*(_Done() for _ in sends), *(_Awaited(self._rank, parcel, self._rendezvous) for parcel in receives)]


@dataclass(frozen=True)
class _Done:
    def wait(self) -> None:
        pass


@dataclass(frozen=True)
class _Awaited:
    rank: int
    parcel: Parcel
    rendezvous: Rendezvous

    def wait(self) -> None:
        found = self.rendezvous.receive(self.rank, self.parcel.rank, self.parcel.name)
        for buffer, tensor in zip(self.parcel.tensors, found, strict=True):
            if buffer.dtype != tensor.dtype:
                raise TypeError(f"{self.parcel.name} has the dtype {tensor.dtype}, {buffer.dtype} is expected")
            buffer.copy_(tensor)


class ProcessMail:
    """The mail of a process, over the default process group."""

    def __init__(self, communicator: ProcessCommunicator) -> None:
        self._communicator = communicator

    def begin(self, sends: Sequence[Parcel], receives: Sequence[Parcel]) -> list[Pending]:
        operations: list[dist.P2POp] = []
        messages: list[_Messages] = []
        for send, parcels in ((dist.isend, sends), (dist.irecv, receives)):
            for parcel in parcels:
                made = _messages(parcel, sent=send is dist.isend)
                operations += [dist.P2POp(send, t, parcel.rank) for t in made.go]
                messages.append(made)
        call = self._communicator.last_call
        ranks = {parcel.rank for parcel in (*sends, *receives)}
        with named(call, ranks.pop() if len(ranks) == 1 else None):
            works = dist.batch_isend_irecv(operations) if operations else []
        if len(works) != len(operations):  # a backend that finishes all of a batch together
            return [_UnderWay(works, call, m) for m in messages]
        given = iter(works)
        return [_UnderWay([next(given) for _ in m.go], call, m) for m in messages]


@dataclass(frozen=True)
class _Messages:
    """The other rank, the tensors that go or that are received into, and those that a packed one is taken apart into
    once it came."""

    peer: int
    go: Sequence[Tensor]
    packed: Sequence[Tensor] = ()


def _messages(parcel: Parcel, *, sent: bool) -> _Messages:
    """Both sides find the same, for they know the same shapes and dtypes."""
    full = [t for t in parcel.tensors if t.numel()]
    if len(full) < 2 or len({t.dtype for t in full}) > 1 or sum(t.nbytes for t in full) > PACKED:
        return _Messages(parcel.rank, full)
    if sent:
        return _Messages(parcel.rank, [torch.cat([t.reshape(-1) for t in full])])
    return _Messages(parcel.rank, [full[0].new_empty(sum(t.numel() for t in full))], full)


@dataclass(frozen=True)
class _UnderWay:
    works: Sequence[dist.Work]
    call: str
    messages: _Messages

    def wait(self) -> None:
        with named(self.call, self.messages.peer):
            for work in self.works:
                work.wait()
        if packed := self.messages.packed:
            (came,) = self.messages.go
            parts = torch.split(came, [t.numel() for t in packed])
            for tensor, part in zip(packed, parts, strict=True):
                tensor.copy_(part.view_as(tensor))
