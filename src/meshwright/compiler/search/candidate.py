"""A candidate: what the search decides about a plan.

The shape is an ordered list of mesh axes, outermost first, so the layout on the links is a part of it. Further axes
(pipe, context, expert) join as further names in that list.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from meshwright.compiler.plan import Save

REPLICA, DATA, TENSOR = "replica", "data", "tensor"
SAVES: dict[Save, str] = {"all": "none", "matmuls": "selective", "nothing": "full"}
"""By what is saved for backward: what the field calls recomputing the rest."""


@dataclass(frozen=True)
class Candidate:
    """One point of the search. Hashable, so that it is priced once."""

    axes: tuple[tuple[str, int], ...]
    """The mesh: ``replica`` holds copies, storage is cut over ``data``, heads and widths over ``tensor``. Sizes above 1
    only; empty: one rank."""
    storage: int = 0
    """The ZeRO level over ``data``: 0 nothing, 1 optimizer state, 2 gradients too, 3 parameters too (FSDP)."""
    sequence: bool = False
    microbatches: int = 1
    save: Save = "all"
    """What blocks keep for backward."""
    every: int = 1
    """Only every so many blocks recompute."""
    prefetch: int = 0
    offload: bool = False
    """Whether the optimizer state is kept in the host's memory."""
    whole: tuple[str, ...] = ()
    """What is not cut over ``tensor`` although it could be (``vocabulary``)."""

    def size(self, *axes: str) -> int:
        """The number of ranks along some axes together; one that the mesh does not have counts 1."""
        found = 1
        for name, size in self.axes:
            if name in axes:
                found *= size
        return found

    @property
    def ranks(self) -> int:
        return math.prod(size for _, size in self.axes)

    @property
    def batch_ranks(self) -> int:
        """Over how many ranks the batch is cut."""
        return self.size(REPLICA) * self.size(DATA)

    @property
    def cut(self) -> int:
        """Over how many ranks storage is cut."""
        return self.size(DATA) if self.storage else 1

    @property
    def text(self) -> str:
        """In the words of presets and pins: ``fsdp=8,tp=8,sp,micro=4,selective,prefetch``."""
        names = {REPLICA: "ddp", DATA: "fsdp" if self.storage == 3 else f"zero{self.storage}", TENSOR: "tp"}
        words = [f"{names.get(axis, axis)}={size}" for axis, size in self.axes] or ["ddp=1"]
        words += ["sp"] * self.sequence
        words += [f"micro={self.microbatches}"] * (self.microbatches > 1)
        if self.save != "all":
            word = "selective" if self.save == "matmuls" else "recompute"
            words.append(f"{word}={self.every}" if self.every > 1 else word)
        if self.prefetch:
            words.append(f"prefetch={self.prefetch}" if self.prefetch > 1 else "prefetch")
        words += ["offload"] * self.offload
        return ",".join([*words, *(f"whole={name}" for name in self.whole)])

    @property
    def recompute(self) -> str:
        """``none``, ``selective``, ``full``, ``full/2`` (every second block)."""
        return SAVES[self.save] + (f"/{self.every}" if self.every > 1 else "")

    def __str__(self) -> str:
        return self.text

    def simplicity(self) -> tuple[int, ...]:
        """Less is simpler. Plans that are as fast as each other are chosen by it: plain data parallelism where it
        fits, then full sharding; tensor parallelism, recomputation and offload only for a gain."""
        levels = {0: 0, 3: 1, 1: 2, 2: 3}
        return (
            int(self.offload),
            int(self.size(TENSOR) > 1),
            0 if self.save == "all" else 2 if self.save == "nothing" else 1,
            int([a for a, _ in self.axes] != [a for a in (REPLICA, DATA, TENSOR) if self.size(a) > 1]),
            int(self.storage > 0 and self.size(REPLICA) > 1),
            levels[self.storage],
            len(self.whole),
            self.microbatches,
            self.size(TENSOR),
            -self.prefetch,
        )
