"""Sets of input tokens as bits of int64 words.

A set is the last dim of an int64 tensor, ``[*shape, words]``. It has two planes of equal width: the first half says on
which tokens a value may depend, the second half on which it depends without a choice in between (a sort, a
comparison, an index that was computed), where the first says only what any choice could bring.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from meshwright.compiler.causality.typed import joint_shape, split_dim

BITS = 62
"""Bits used of a word, so that every word is a number above zero."""


def width_of(bits: int) -> int:
    """Words of both planes for a number of tokens."""
    return 2 * max(1, -(-bits // BITS))


def single(bit: int, width: int) -> Tensor:
    """``[width]``: the set of one token, in both planes."""
    word = torch.zeros(width, dtype=torch.int64)
    word[bit // BITS] = word[width // 2 + bit // BITS] = 1 << (bit % BITS)
    return word


def softened(words: Tensor) -> Tensor:
    """The same sets, all of them by way of a choice."""
    made = words.clone()
    made[..., words.shape[-1] // 2 :] = 0
    return made


def union(a: Tensor, b: Tensor) -> Tensor:
    """Element by element. Along dims in which neither varies (as after a matrix product) it is done once."""
    shape = joint_shape(a.shape, b.shape)
    a, b = a.expand(shape), b.expand(shape)
    for dim in range(len(shape) - 1):
        if shape[dim] > 1 and a.stride(dim) == 0 and b.stride(dim) == 0:
            a, b = a.narrow(dim, 0, 1), b.narrow(dim, 0, 1)
    return (a | b).expand(shape)


def any_over(words: Tensor, dims: Sequence[int], keepdim: bool = False) -> Tensor:
    """The union over dims of the shape (the last dim, that of the words, is not counted and never reduced)."""
    rank = words.dim() - 1
    wanted = sorted({d % rank for d in dims}) if rank else []
    for dim in reversed(wanted):
        words = _any(words, dim).unsqueeze(dim)
    if not keepdim:
        for dim in reversed(wanted):
            words = words.squeeze(dim)
    return words


def _any(words: Tensor, dim: int) -> Tensor:
    count = words.shape[dim]
    if count == 0:
        shape = list(words.shape)
        del shape[dim]
        return words.new_zeros(shape)
    if words.stride(dim) == 0:
        return words.select(dim, 0)
    while count > 1:
        half = count // 2
        joined = words.narrow(dim, 0, half) | words.narrow(dim, half, half)
        if count % 2:
            joined = torch.cat([joined, words.narrow(dim, count - 1, 1)], dim)
        words, count = joined, joined.shape[dim]
    return words.select(dim, 0)


def running(words: Tensor, dim: int) -> Tensor:
    """The union over all elements up to each along a dim."""
    rank = words.dim() - 1
    dim = dim % rank if rank else 0
    if rank == 0:
        return words
    step, count = 1, words.shape[dim]
    while step < count:
        joined = words.clone()
        joined.narrow(dim, step, count - step).bitwise_or_(words.narrow(dim, 0, count - step))
        words, step = joined, 2 * step
    return words


def unpack(words: Tensor) -> Tensor:
    """``[*shape, bits]`` of 0.0 and 1.0: what matrix products and convolutions can count."""
    shifts = torch.arange(BITS, device=words.device)
    return ((words.unsqueeze(-1) >> shifts) & 1).flatten(-2).to(torch.float32)


def pack(bits: Tensor) -> Tensor:
    """The inverse of :func:`unpack`; anything above zero counts as 1."""
    split = split_dim(bits > 0, -1, (-1, BITS)).to(torch.int64)
    joined: Tensor = (split << torch.arange(BITS, device=bits.device)).sum(-1)
    return joined


def members(words: Tensor) -> list[int]:
    """The tokens of one set, ``[plane words]``."""
    found: list[int] = []
    for place, word in enumerate(words.tolist()):
        found.extend(place * BITS + bit for bit in range(BITS) if word >> bit & 1)
    return found
