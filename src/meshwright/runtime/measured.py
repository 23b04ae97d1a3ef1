"""What a run measured of a step, kept beside what was predicted when the plan was chosen: ``measured.json``."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from statistics import median
from typing import Any

from meshwright.compiler.plan import Predicted
from meshwright.runtime.holdings import Holdings
from meshwright.runtime.metrics import Metrics

FILE = "measured.json"
WARM = 1
"""Steps at the beginning that are not typical: memory and connections are set up."""
KINDS = {"parameter": "parameters", "state": "optimizer state", "buffer": "buffers"}


@dataclass(frozen=True)
class MeasuredRank:
    """The memory of one rank."""

    rank: int
    pipe: int
    """Its coordinate along the axis ``pipe``; 0 without one."""
    peak: int
    """Bytes at the peak: of the device's allocator, or by how much the process grew since before it had weights."""
    memory: Mapping[str, int]
    """Bytes by kind: what is held throughout, and ``everything else`` at the peak."""


@dataclass(frozen=True)
class Measured:
    """Of all ranks; times are those of rank 0, with which all others go in step."""

    steps: int
    """How many steps the medians are of."""
    step_time: float
    tokens_per_second: float
    device: str
    ranks: tuple[MeasuredRank, ...]
    """By ``pipe`` coordinate, of the ranks that should need as much as each other the one that needed most."""

    @property
    def fullest(self) -> MeasuredRank:
        """The rank that needed most memory."""
        return max(self.ranks, key=lambda one: one.peak)

    def at(self, pipe: int) -> MeasuredRank | None:
        """The rank at a ``pipe`` coordinate."""
        return next((one for one in self.ranks if one.pipe == pipe), None)


def measured_rank(
    history: Sequence[Metrics], holdings: Holdings, base: int, device: str, rank: int, pipe: int = 0
) -> MeasuredRank:
    """What this rank needed in the steps of ``history``, of which there is one at least. ``base``: bytes in use before
    there were weights."""
    held: dict[str, int] = {}
    for value, tensor in holdings.items():
        if tensor.device.type == device:
            held[KINDS[value.kind]] = held.get(KINDS[value.kind], 0) + tensor.numel() * tensor.element_size()
    peak = max(0, max(step.peak for step in history) - base)
    return MeasuredRank(rank, pipe, peak, {**held, "everything else": max(0, peak - sum(held.values()))})


def measured_of(history: Sequence[Metrics], ranks: Iterable[MeasuredRank], device: str) -> Measured:
    """The measured values of a run: the steps of one rank, of which there is one at least, and the memory of all."""
    typical = history[WARM:] or history
    most: dict[int, MeasuredRank] = {}
    for one in ranks:
        if one.pipe not in most or one.peak > most[one.pipe].peak:
            most[one.pipe] = one
    return Measured(
        steps=len(typical),
        step_time=median(step.seconds for step in typical),
        tokens_per_second=median(step.tokens_per_second for step in typical),
        device=device,
        ranks=tuple(most[pipe] for pipe in sorted(most)),
    )


def write_measured(path: Path, measured: Measured, predicted: Predicted | None) -> None:
    """Write both."""
    content = {"measured": asdict(measured), "predicted": asdict(predicted) if predicted is not None else None}
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def read_measured(path: Path) -> Measured | None:
    """What a run left; None if there was none, or the file is of another version."""
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))["measured"]
        ranks = tuple(MeasuredRank(**{f.name: one[f.name] for f in fields(MeasuredRank)}) for one in found["ranks"])
        return Measured(**{**{f.name: found[f.name] for f in fields(Measured)}, "ranks": ranks}) if ranks else None
    except (OSError, ValueError, KeyError, TypeError):
        return None
