"""Correct plans of many kinds, in which neither tier may find anything."""

from __future__ import annotations

from tests.models import Variant
from tests.parity.cells import COLUMNS, MICROBATCHES, ROWS, VARIANTS, cells_of
from tests.parity.harness import Cell, Task
from tests.parity.pipeline_cells import COVERING, pipeline_cell

DROPPED = Variant(dropout=0.1)
TREATED = (
    "fsdp=2,recompute",
    "fsdp=2,tp=2,sp,recompute",
    "fsdp=2,selective",
    "fsdp=2,prefetch=1",
    "fsdp=2,tp=2,prefetch=2",
    "ddp=2,fsdp=2,prefetch=1,recompute=2",
    "fsdp=2,offload",
    "zero1=2,offload",
    "zero2=2,tp=2,sp",
)
"""Presets that recompute, offload, or gather ahead."""
RANKS = {"fsdp=2": 2, "zero1=2": 2, "zero2=2": 4}


def _ranks(preset: str) -> int:
    count = 1
    for word in preset.split(","):
        name, _, size = word.partition("=")
        count *= int(size) if name in ("ddp", "fsdp", "tp", "zero1", "zero2") else 1
    return count


PLANS: tuple[Cell, ...] = (
    *(Cell(task, row.preset, row.ranks, count) for task in COLUMNS.values() for row in ROWS for count in MICROBATCHES),
    *(cell for task, row in VARIANTS for cell in cells_of(task, row)),
    *(Cell(Task(model, DROPPED), p, _ranks(p), n) for model in ("gpt.mw", "Llama") for p in TREATED for n in (1, 2)),
    *(pipeline_cell(*cell) for cell in COVERING),
)
"""More than two hundred."""
QUICK = (
    *(cell for cell in PLANS if cell.task == Task("gpt.mw")),
    *(cell for cell in PLANS if cell.task == Task("gpt.mw", DROPPED)),
    *(cell for cell in PLANS if cell.task == Task("Llama")),
    *(pipeline_cell(*cell) for cell in COVERING[:6]),
)
"""Those of models that are captured for other tests as well."""
