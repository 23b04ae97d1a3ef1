"""How long one kernel takes on a device."""

from __future__ import annotations

from dataclasses import replace

from meshwright.compiler.cluster.device import Device
from meshwright.compiler.summary import Kernel


def kernel_seconds(device: Device, kernel: Kernel) -> float:
    """The longer of computing and moving bytes, at the rates that the device reaches for these sizes; no launch."""
    if kernel.kind == "view":
        return 0.0
    moving = (kernel.read + kernel.written) / (device.bandwidth * device.efficiency.memory)
    if kernel.kind == "matmul":
        return max(kernel.flops / (peak(device, kernel.dtype) * matmul_efficiency(device, kernel.sizes)), moving)
    if kernel.kind == "attention":
        return max(kernel.flops / (peak(device, kernel.dtype) * attention_efficiency(device, kernel)), moving)
    return moving


def with_attention(device: Device, generation: str) -> Device:
    """The device when its fused attention kernels are of that generation (``flash-1`` or ``flash-2``)."""
    if generation != "flash-1":
        return device
    known = device.efficiency
    share = known.attention_first
    slower = replace(known, attention=known.attention * share, attention_backward=known.attention_backward * share)
    return replace(device, efficiency=slower)


def peak(device: Device, dtype: str) -> float:
    """Dense FLOP/s in a dtype."""
    return device.flops[rated(device, dtype)]


def rated(device: Device, dtype: str) -> str:
    """The dtype whose rate counts: where a device has none for ``dtype``, that of f32, else the slowest there is."""
    if dtype in device.flops:
        return dtype
    return "f32" if "f32" in device.flops else min(device.flops, key=lambda name: device.flops[name])


TILE = 128
"""Rows and columns of the result that a device computes in one piece."""
VECTOR = 8
"""Elements that a device with matrix units loads at once."""


def matmul_efficiency(device: Device, sizes: tuple[int, ...]) -> float:
    """The share of the peak that a matrix product of ``(batch, m, n, k)`` reaches.

    It saturates in each of m, n and k. A device that is no host computes whole tiles, also where less is wanted, and
    loads less at once where rows do not begin at multiples of its vectors.
    """
    share = device.efficiency.matmul
    for size in sizes[1:]:
        share *= size / (size + device.efficiency.matmul_half)
    if device.is_host or len(sizes) != 4:
        return share
    _, m, n, k = sizes
    for size in (m, n):
        if size >= TILE:
            share *= size / (-(-size // TILE) * TILE)
    return share * (device.efficiency.unaligned if n % VECTOR or k % VECTOR else 1.0)


def attention_efficiency(device: Device, kernel: Kernel) -> float:
    """The share of the peak that a fused attention reaches."""
    known = device.efficiency
    share = known.attention_backward if "backward" in kernel.op else known.attention
    keys = kernel.sizes[3] if known.attention_half else 1
    return share * keys / (keys + known.attention_half)
