"""Names of ``torch.distributed`` that its type stubs do not export, in one place."""

from __future__ import annotations

from typing import Any, cast

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load as read_checkpoint
from torch.distributed.checkpoint.state_dict_saver import save as write_checkpoint
from torch.distributed.rendezvous import rendezvous

__all__ = [
    "CheckpointException",
    "FileSystemReader",
    "FileSystemWriter",
    "PrefixStore",
    "Store",
    "TCPStore",
    "all_gather_single",
    "connection_of_its_own",
    "read_checkpoint",
    "reduce_scatter_single",
    "rendezvous",
    "write_checkpoint",
]

# the names changed in torch 2.13; the old ones warn there
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def connection_of_its_own(store: Store, prefix: str) -> Store:
    """The same store, keys prefixed, over a new connection: a waiting thread blocks the one that it waits on."""
    return PrefixStore(prefix, cast(Any, store).clone())
