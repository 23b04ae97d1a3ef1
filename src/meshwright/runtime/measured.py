"""What a run measured of a step, kept beside what was predicted when the plan was chosen: ``measured.json``."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
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
class Measured:
    """Of rank 0. ``memory`` has bytes by kind: what is held throughout, and ``everything else`` at the peak."""

    steps: int
    """How many steps the medians are of."""
    step_time: float
    tokens_per_second: float
    peak: int
    """Bytes at the peak: of the device's allocator, or by how much the process grew since before it had weights."""
    device: str
    memory: Mapping[str, int]


def measured_of(history: Sequence[Metrics], holdings: Holdings, base: int, device: str) -> Measured | None:
    """The measured values of a run; None if it did no step. ``base``: bytes in use before there were weights."""
    typical = history[WARM:] or history
    if not typical:
        return None
    held: dict[str, int] = {}
    for value, tensor in holdings.items():
        if tensor.device.type == device:
            held[KINDS[value.kind]] = held.get(KINDS[value.kind], 0) + tensor.numel() * tensor.element_size()
    peak = max(0, max(step.peak for step in history) - base)
    return Measured(
        steps=len(typical),
        step_time=median(step.seconds for step in typical),
        tokens_per_second=median(step.tokens_per_second for step in typical),
        peak=peak,
        device=device,
        memory={**held, "everything else": max(0, peak - sum(held.values()))},
    )


def write_measured(path: Path, measured: Measured, predicted: Predicted | None) -> None:
    """Write both."""
    content = {"measured": asdict(measured), "predicted": asdict(predicted) if predicted is not None else None}
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def read_measured(path: Path) -> Measured | None:
    """What a run left; None if there was none, or the file is of another version."""
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))["measured"]
        return Measured(**{f.name: found[f.name] for f in fields(Measured)})
    except (OSError, ValueError, KeyError, TypeError):
        return None
