"""A candidate: what the search decides about a plan.

The shape is an ordered list of mesh axes, outermost first, so the layout on the links is a part of it. Further axes
(context, expert) join as further names in that list.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from meshwright.compiler.plan import PIPE, Save

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
    schedule: str = ""
    """Of a pipeline: a name of ``compiler/schedules``."""
    virtual: int = 1
    """Of a pipeline: the stages on each rank."""
    by_stage: bool = False
    """Of a pipeline: whether each stage recomputes only as much as it must, ``save`` at most."""

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
    def pipe(self) -> int:
        """Over how many ranks the model is cut by depth."""
        return self.size(PIPE)

    @property
    def inner(self) -> Candidate:
        """What the ranks of each stage do, as if the model had no other."""
        return replace(self, axes=tuple(a for a in self.axes if a[0] != PIPE), schedule="", virtual=1, by_stage=False)

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
        names = {REPLICA: "ddp", DATA: "fsdp" if self.storage == 3 else f"zero{self.storage}", TENSOR: "tp", PIPE: "pp"}
        words = [f"{names.get(axis, axis)}={size}" for axis, size in self.axes] or ["ddp=1"]
        words += ["sp"] * self.sequence
        words += [f"micro={self.microbatches}"] * (self.microbatches > 1 or self.pipe > 1)
        if self.save != "all":
            word = "selective" if self.save == "matmuls" else "recompute"
            words.append(f"{word}={self.every}" if self.every > 1 else word)
        words += ["by-stage"] * self.by_stage
        if self.prefetch:
            words.append(f"prefetch={self.prefetch}" if self.prefetch > 1 else "prefetch")
        words += ["offload"] * self.offload
        words += [f"schedule={self.schedule}"] if self.schedule else []
        words += [f"virtual={self.virtual}"] if self.virtual > 1 else []
        return ",".join([*words, *(f"whole={name}" for name in self.whole)])

    @property
    def recompute(self) -> str:
        """``none``, ``selective``, ``full``, ``full/2`` (every second block)."""
        return SAVES[self.save] + (f"/{self.every}" if self.every > 1 else "") + " by stage" * self.by_stage

    def __str__(self) -> str:
        return self.text

    def simplicity(self) -> tuple[int, ...]:
        """Less is simpler. Plans that are as fast as each other are chosen by it: plain data parallelism where it
        fits, then full sharding; tensor parallelism, recomputation and offload only for a gain."""
        levels = {0: 0, 3: 1, 1: 2, 2: 3}
        return (
            int(self.offload),
            int(self.pipe > 1),
            int(self.size(TENSOR) > 1),
            0 if self.save == "all" else 2 if self.save == "nothing" else 1,
            int([a for a, _ in self.axes] != [a for a in (PIPE, REPLICA, DATA, TENSOR) if self.size(a) > 1]),
            int(self.storage > 0 and self.size(REPLICA) > 1),
            levels[self.storage],
            len(self.whole),
            self.microbatches,
            self.size(TENSOR),
            -self.prefetch,
            self.pipe,
            _SCHEDULES.index(self.schedule) if self.schedule in _SCHEDULES else len(_SCHEDULES),
            self.virtual,
            int(self.by_stage),
        )


_SCHEDULES = ("", "1f1b", "interleaved", "gpipe", "breadth-first", "zb-h1")
"""The schedules that are widely known, the simplest first."""
