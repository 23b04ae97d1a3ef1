"""``to_device`` and ``to_host``: copies between the memory of the device and that of its host.

On a machine whose device is the CPU both are the same memory to the processor; what is kept on the host then lies in a
file that is mapped, and a copy is a copy all the same.
"""

from __future__ import annotations

import torch
from torch import Tensor

from meshwright.compiler.graph.ops.library import register


def _to_device(x: Tensor, like: Tensor) -> Tensor:
    if x.device == like.device:
        return x.clone()
    return x.to(like.device, non_blocking=True)


def _to_device_fake(x: Tensor, like: Tensor) -> Tensor:
    return torch.empty_like(x, device=like.device)


def _to_host(store: Tensor, x: Tensor) -> Tensor:
    return store.copy_(x, non_blocking=True)


def _to_host_fake(store: Tensor, x: Tensor) -> Tensor:
    return store


register("to_device(Tensor x, Tensor like) -> Tensor", _to_device, _to_device_fake)
"""A copy of ``x`` on the device where ``like`` is."""

register("to_host(Tensor(a!) store, Tensor x) -> Tensor(a!)", _to_host, _to_host_fake)
"""Writes ``x`` into ``store``, which is on the host, and returns ``store``. Whoever reads the store from the host waits
for the device before."""
