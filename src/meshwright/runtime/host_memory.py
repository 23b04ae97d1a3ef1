"""Memory of the host for what a plan offloads.

Beside a GPU it is pinned memory, from which copies run while the device computes. Where the device is the CPU there is
no other memory than the device's own; then it is a file in the folder for temporary files, mapped into memory, so
that the system writes it out when memory is short. The file has no name any more as soon as it is mapped: the space
is free again when the process ends, however it ends.
"""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from meshwright.compiler.diagnostics import error

ALIGNED = 64
"""Where tensors begin in a mapped file, in bytes."""


@dataclass(frozen=True)
class HostTensor:
    """A tensor to be made on the host, filled with one value."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    fill: float

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def host_tensors(wanted: Mapping[str, HostTensor], device: torch.device) -> dict[str, Tensor]:
    """Tensors in the memory of the host of ``device``. Raises MeshwrightError E0628 if there is no room."""
    if device.type != "cpu":
        return {
            name: torch.full(t.shape, t.fill, dtype=t.dtype, pin_memory=device.type == "cuda")
            for name, t in wanted.items()
        }
    return _mapped(wanted)


def _mapped(wanted: Mapping[str, HostTensor]) -> dict[str, Tensor]:
    starts: dict[str, int] = {}
    size = 0
    for name, tensor in wanted.items():
        starts[name] = size
        size += -(-tensor.bytes // ALIGNED) * ALIGNED
    if not size:
        return {name: torch.full(t.shape, t.fill, dtype=t.dtype) for name, t in wanted.items()}
    file = _file(size)
    made: dict[str, Tensor] = {}
    for name, tensor in wanted.items():
        view = file.narrow(0, starts[name], tensor.bytes).view(tensor.dtype).view(tensor.shape)
        made[name] = view if tensor.fill == 0.0 else view.fill_(tensor.fill)
    return made


def _file(size: int) -> Tensor:
    """So many bytes, all zero, in a mapped file without a name."""
    folder = tempfile.gettempdir()
    try:
        handle, path = tempfile.mkstemp(prefix="meshwright-offload-", dir=folder)
    except OSError as refused:
        raise _no_room(size, folder, refused) from refused
    try:
        # reserved now: writing to a mapped file on a full disk would end the process
        os.posix_fallocate(handle, 0, size)
        return torch.from_file(path, shared=True, size=size, dtype=torch.uint8)
    except OSError as refused:
        raise _no_room(size, folder, refused) from refused
    finally:
        os.close(handle)
        os.unlink(path)


def _no_room(size: int, folder: str, refused: OSError) -> Exception:
    return error(
        "E0628",
        f"optimizer state of {size} bytes cannot be offloaded to '{folder}': {refused.strerror or refused}",
        action="set TMPDIR to a folder with space, or leave 'offload' out of the plan",
    )
