"""The tokens of a step's batch by numbers: a bit for each position of two rows, and one for each other row.

All rows of a batch are treated alike by a program, wherever they lie; two of them, the first and the last, are told
position by position, and of the others only that they are others.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from meshwright.compiler.causality.shadow import Shadow
from meshwright.compiler.causality.words import BITS, single, unpack, width_of

GIVEN = ("mask", "position", "segment", "seg_")
"""What is in the names of inputs that are taken as they are: they say where tokens stand, and are none."""


@dataclass(frozen=True)
class Numbering:
    """The bits of all tensors of a batch."""

    rows: int
    length: int
    names: tuple[str, ...]
    """Tensors with a value for each row and position."""
    whole: tuple[str, ...] = ()
    """Tensors of a row as a whole."""
    spare: int = 20
    """Bits for ops without a rule."""
    targets: frozenset[str] = field(default_factory=frozenset)
    """Labels, where losses are read: each loss may see any of them, and what else it sees is asked."""

    @property
    def told(self) -> tuple[int, ...]:
        """The rows of which each position has a bit."""
        return tuple(dict.fromkeys((0, self.rows - 1)))

    @property
    def each(self) -> int:
        """Bits of one tensor of positions."""
        return len(self.told) * self.length + self.rows - len(self.told)

    @property
    def free(self) -> range:
        """Bits that no token has."""
        first = len(self.names) * self.each + len(self.whole) * self.rows
        return range(first, first + self.spare)

    @property
    def width(self) -> int:
        """Words of a set."""
        return width_of(self.free.stop)

    def bits(self, name: str) -> Tensor:
        """``[rows, length]``: the bit of each token of a tensor."""
        if name in self.whole:
            first = len(self.names) * self.each + self.whole.index(name) * self.rows
            return (first + torch.arange(self.rows))[:, None].expand(-1, self.length)
        made = torch.zeros(self.rows, self.length, dtype=torch.int64)
        bit = self.names.index(name) * self.each
        for row in range(self.rows):
            told = row in self.told
            made[row] = bit + (torch.arange(self.length) if told else 0)
            bit += self.length if told else 1
        return made

    def shadow(self, name: str, value: Tensor, batch_dim: int) -> Shadow:
        """The shadow of a tensor of the batch, whose positions, if it has any, are the dim behind its rows."""
        bits = self.bits(name) if name in self.names else self.bits(name)[:, :1]
        table = torch.stack([single(int(b), self.width) for b in bits.flatten()]).reshape(*bits.shape, self.width)
        shape = [1] * value.dim()
        for dim, size in zip((batch_dim, batch_dim + 1), bits.shape, strict=True):
            if dim < value.dim():
                shape[dim] = size
        words = table.reshape(*shape, self.width).expand(*value.shape, self.width)
        return Shadow(torch.zeros(value.shape, dtype=torch.bool), words.contiguous())

    def seen(self, words: Tensor, soft: bool = True) -> Tensor:
        """``[..., bits]`` of sets ``[..., width]``; not ``soft``: without what is seen by way of a choice alone."""
        half = self.width // 2
        plane = words[..., :half] if soft else words[..., half:]
        return unpack(plane)[..., : half * BITS] > 0

    def forbidden(self, kind: str, row: int, time: int) -> Tensor:
        """``[bits]``: what the output at a position must not see, of later tokens of its row (``future``) or of other
        rows (``batch``). Labels count only where outputs are logits, which are given none."""
        made = torch.zeros(self.width // 2 * BITS, dtype=torch.bool)
        for name in (n for n in (*self.names, *self.whole) if n not in self.targets):
            bits = self.bits(name)
            if kind == "future" and name in self.names and row in self.told:
                made[bits[row, time + 1 :]] = True
            elif kind == "batch":
                others = torch.arange(self.rows) != row
                made[bits[others].flatten()] = True
        return made

    def named(self, bit: int) -> str:
        """What a bit stands for, for people."""
        for name in (*self.names, *self.whole):
            at = (self.bits(name) == bit).nonzero()
            if at.shape[0] == 1:
                return f"'{name}' at row {int(at[0, 0])}, position {int(at[0, 1])}"
            if at.shape[0]:
                return f"'{name}' of row {int(at[0, 0])}"
        return "an op without a rule"


def given_values(name: str, value: Tensor, time_dim: int) -> Tensor | None:
    """For an input that is taken as it is: all positions seen, counted from 0, of one document. None: it is tokens."""
    lower = name.lower()
    if value.dtype != torch.bool and not any(word in lower for word in GIVEN):
        return None
    if "position" in lower:
        line = torch.arange(value.shape[time_dim]) if time_dim < value.dim() else torch.zeros(1)
        shape = [-1 if d == time_dim else 1 for d in range(value.dim())]
        return line.to(value.dtype).reshape(shape).expand(value.shape).clone()
    return torch.zeros_like(value) if "seg" in lower else torch.ones_like(value)


def numbered(
    batch: Mapping[str, Tensor], batch_dims: Mapping[str, int | None], rows: int, length: int, targets: frozenset[str]
) -> Numbering:
    """The numbering of a step's batch."""
    places: list[str] = []
    whole: list[str] = []
    for name, value in batch.items():
        dim = batch_dims.get(name)
        if dim is None or given_values(name, value, dim + 1) is not None:
            continue
        (places if value.dim() > dim + 1 and value.shape[dim + 1] == length else whole).append(name)
    return Numbering(rows, length, tuple(places), tuple(whole), targets=targets)
