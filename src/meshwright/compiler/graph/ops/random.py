"""``dropout``: random numbers that belong to elements of the whole tensor, not to a device.

An element is kept iff ``hash(seed, site, i) >= p`` where ``i`` is its linear index in the whole
tensor, so every shard of every mesh, every microbatch and every recomputation sees the same mask.

The hash is splitmix64 (Steele, Lea, Flood 2014: "Fast splittable pseudorandom number generators")
as a counter-based generator: with ``mix`` its finalizer and all arithmetic modulo 2**64,

    base = mix(mix(mix(seed[0] + G) + seed[1] + G) + site + G)
    hash = mix(base + G * (i + 1)),       G = 0x9E3779B97F4A7C15

of which the upper 53 bits, as a fraction of 2**53, are the number in [0, 1) compared with ``p``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from meshwright.compiler.graph.ops.library import differentiate, register
from meshwright.compiler.graph.ops.pieces import pieces


def _signed(value: int) -> int:
    """The int64 with the same 64 bits."""
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >> 63 else value


GOLDEN = _signed(0x9E3779B97F4A7C15)
_FIRST = _signed(0xBF58476D1CE4E5B9)
_SECOND = _signed(0x94D049BB133111EB)


def _shift(x: Tensor, bits: int) -> Tensor:
    """Logical shift to the right (torch shifts the sign in)."""
    return torch.bitwise_right_shift(x, bits).bitwise_and_((1 << (64 - bits)) - 1)


def _mix(x: Tensor) -> Tensor:
    """splitmix64's finalizer, in place."""
    x.bitwise_xor_(_shift(x, 30)).mul_(_FIRST)
    x.bitwise_xor_(_shift(x, 27)).mul_(_SECOND)
    return x.bitwise_xor_(_shift(x, 31))


def linear_index(
    shape: torch.Size | tuple[int, ...], sizes: list[int], offsets: list[int], device: torch.device
) -> Tensor:
    """The index in the whole tensor of each element of a shard of it.

    ``sizes`` is the whole shape, ``offsets`` where the shard begins in it; both empty: the shard is
    the whole. A dim that is a product of several pieces may be given as those pieces; the
    shard's length along each piece then follows the offsets (``len(offsets) == 2 * len(sizes)``).
    """
    if not sizes:
        return torch.arange(torch.Size(shape).numel(), device=device).view(shape)
    rank = len(sizes)
    starts, lengths = offsets[:rank], offsets[rank:] or list(shape)
    if len(starts) != rank or len(lengths) != rank:
        raise ValueError(f"a shard of shape {tuple(shape)} cannot lie at {offsets} in {sizes}")
    index = torch.zeros((), dtype=torch.int64, device=device)
    stride = 1
    for dim in reversed(range(rank)):
        along = torch.arange(starts[dim], starts[dim] + lengths[dim], device=device).mul_(stride)
        index = index + along.view(-1, *[1] * (rank - 1 - dim))
        stride *= sizes[dim]
    return index.reshape(shape)


def keep(seed: Tensor, site: int, index: Tensor, p: float) -> Tensor:
    """Which elements of the whole tensor, by linear index, survive dropout with probability ``p``. Eight bytes for each
    element are much, so ``index`` is overwritten."""
    base = torch.zeros(1, dtype=torch.int64, device=index.device)
    for part in (seed[0], seed[1], site):
        base = _mix(base + part + GOLDEN)
    number = _mix(index.add_(1).mul_(GOLDEN).add_(base))
    return _shift(number, 11) >= round(p * (1 << 53))


def _dropout(x: Tensor, seed: Tensor, p: float, site: int, sizes: list[int], offsets: list[int]) -> Tensor:
    if p >= 1.0:
        return torch.zeros_like(x, memory_format=torch.contiguous_format)
    if not x.dim() or len(offsets) > x.dim():
        return _dropped(x, seed, p, site, linear_index(x.shape, sizes, offsets, x.device))
    made = torch.empty_like(x, memory_format=torch.contiguous_format)
    sizes, offsets = sizes or list(x.shape), offsets or [0] * x.dim()
    for start, end in pieces(x.shape[0], x[0].numel() if x.shape[0] else 1):
        part = x[start:end]
        index = linear_index(part.shape, sizes, [offsets[0] + start, *offsets[1:]], x.device)
        made[start:end] = _dropped(part, seed, p, site, index)
    return made


def _dropped(x: Tensor, seed: Tensor, p: float, site: int, index: Tensor) -> Tensor:
    return torch.where(keep(seed, site, index, p), x * (1.0 / (1.0 - p)), 0.0).to(x.dtype).contiguous()


def _dropout_fake(x: Tensor, seed: Tensor, p: float, site: int, sizes: list[int], offsets: list[int]) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, seed, *ctx.rest = inputs
    ctx.save_for_backward(seed)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    (seed,) = ctx.saved_tensors
    return torch.ops.meshwright.dropout(grad, seed, *ctx.rest), None, None, None, None, None


register(
    "dropout(Tensor x, Tensor seed, float p, int site, int[] sizes, int[] offsets) -> Tensor", _dropout, _dropout_fake
)
differentiate("dropout", _backward, _setup)
