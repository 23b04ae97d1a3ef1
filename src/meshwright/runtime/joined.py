"""A user's script as one of several ranks: it joins the group of its launcher, and is told which rank failed."""

from __future__ import annotations

import atexit
import contextlib
import os
from collections.abc import Iterator

import torch
import torch.distributed as dist

from meshwright.compiler.diagnostics import error
from meshwright.runtime.communicator import ProcessCommunicator
from meshwright.runtime.failure import CollectiveFailed, RankFailed, Watch
from meshwright.runtime.torch_distributed import PrefixStore, connection_of_its_own, rendezvous

LINGER = 2.0
"""Seconds for which rank 0, with which the store may live, waits at its end for ranks that are about to end too."""

_watches: list[Watch] = []
"""The one of this process, if it has joined the group here: the script is one rank for as long as it runs."""


def join() -> int:
    """The number of ranks; joins the process group of the launcher if nobody has. Raises E0601 without a launcher."""
    if not dist.is_initialized():
        if "RANK" not in os.environ:
            raise error(
                "E0601",
                "parallelize runs under a launcher, and no launcher has started this process",
                None,
                "start the script with torchrun, or use virtual=N for N ranks in this process",
            )
        store, rank, ranks = next(rendezvous("env://"))
        backend = "nccl" if torch.cuda.is_available() else "gloo"
        dist.init_process_group(backend, store=PrefixStore("ranks", store), rank=rank, world_size=ranks)
        _watches.append(Watch(connection_of_its_own(store, "watch"), rank, ranks, stop=_go_on))
        atexit.register(leave)
    return dist.get_world_size()


@contextlib.contextmanager
def explained(communicator: ProcessCommunicator) -> Iterator[None]:
    """A collective or a message that fails is told with the rank that is to blame. Raises RankFailed; where the script
    has made the process group itself there is nobody to ask, and the error is raised as it is."""
    for watch in _watches:
        watch.last_call = lambda: communicator.last_call
    try:
        yield
    except CollectiveFailed as broken:
        for watch in _watches:
            raise RankFailed(watch.cause_of(broken).text) from None
        raise


def _go_on(failure: object) -> None:
    """What another rank has told is asked for when a collective fails; until then the script is the user's."""


def leave() -> None:
    """At the end of the script, where the user has not done it."""
    for watch in _watches:
        watch.close()
        if watch.rank == 0:
            watch.linger(LINGER)
    if dist.is_initialized():
        dist.destroy_process_group()
