"""The cells of the parity table: which plans, which models, which variants; and the few that every test run does."""

from __future__ import annotations

from dataclasses import dataclass

from tests.models import Variant
from tests.parity.harness import Cell, Task


@dataclass(frozen=True)
class Row:
    """One plan of the table: its name there, the text of the preset, the number of ranks."""

    name: str
    preset: str
    ranks: int


ROWS = (
    Row("ddp 4", "ddp=4", 4),
    Row("zero1 4", "zero1=4", 4),
    Row("zero2 4", "zero2=4", 4),
    Row("fsdp 4", "fsdp=4", 4),
    Row("tp 2", "tp=2", 2),
    Row("tp 4 (2 key/value heads)", "tp=4", 4),
    Row("tp 3 (divides nothing)", "tp=3", 3),
    Row("fsdp 2 x tp 2", "fsdp=2,tp=2", 4),
    Row("fsdp 2 x tp 2, sequence", "fsdp=2,tp=2,sp", 4),
    Row("ddp 2 x fsdp 2 x tp 2", "ddp=2,fsdp=2,tp=2", 8),
)
MICROBATCHES = (1, 4)

BY_NAME = {row.name: row for row in ROWS}

COLUMNS: dict[str, Task] = {
    "gpt.mw": Task("gpt.mw"),
    "llama.mw": Task("llama.mw"),
    "GPT-2": Task("GPT-2"),
    "Llama": Task("Llama"),
    "Qwen3": Task("Qwen3"),
    "BERT": Task("BERT"),
    "ViT": Task("ViT"),
}

VARIANTS: tuple[tuple[Task, str], ...] = (
    (Task("GPT-2", Variant(dropout=0.1)), "fsdp 2 x tp 2"),
    (Task("GPT-2", Variant(dropout=0.1)), "fsdp 2 x tp 2, sequence"),
    (Task("BERT", Variant(dropout=0.1)), "ddp 2 x fsdp 2 x tp 2"),
    (Task("ViT", Variant(dropout=0.1)), "tp 3 (divides nothing)"),
    (Task("Llama", Variant(dropout=0.1)), "tp 4 (2 key/value heads)"),
    (Task("GPT-2", Variant(tied=False)), "fsdp 2 x tp 2"),
    (Task("Llama", Variant(tied=True)), "fsdp 2 x tp 2"),
    (Task("Llama", Variant(tied=True)), "tp 3 (divides nothing)"),
    (Task("Llama", optimizer="SGD", clip=None), "zero2 4"),
    (Task("GPT-2", optimizer="SGD"), "fsdp 2 x tp 2"),
    (Task("Llama", optimizer="Muon"), "fsdp 4"),
    (Task("Llama", optimizer="Muon"), "fsdp 2 x tp 2"),
    (Task("ViT", optimizer="Muon", clip=None), "zero1 4"),
)
"""What differs from the table's own AdamW, clipping and no dropout, each under one plan."""


def cells_of(task: Task, row: str) -> list[Cell]:
    """The cell without and with microbatches."""
    found = BY_NAME[row]
    return [Cell(task, found.preset, found.ranks, count) for count in MICROBATCHES]


QUICK: tuple[Cell, ...] = tuple(
    cells_of(task, row)[index]
    for task, row, index in (
        (COLUMNS["gpt.mw"], "fsdp 2 x tp 2", 1),
        (COLUMNS["gpt.mw"], "zero1 4", 0),
        (COLUMNS["llama.mw"], "ddp 2 x fsdp 2 x tp 2", 0),
        (COLUMNS["llama.mw"], "tp 2", 1),
        (COLUMNS["GPT-2"], "ddp 4", 1),
        (COLUMNS["GPT-2"], "tp 3 (divides nothing)", 0),
        (COLUMNS["GPT-2"], "fsdp 2 x tp 2, sequence", 0),
        (COLUMNS["Llama"], "fsdp 4", 1),
        (COLUMNS["Llama"], "tp 4 (2 key/value heads)", 0),
        (COLUMNS["Llama"], "fsdp 2 x tp 2, sequence", 1),
        (COLUMNS["Qwen3"], "zero2 4", 1),
        (COLUMNS["Qwen3"], "tp 3 (divides nothing)", 0),
        (COLUMNS["BERT"], "fsdp 2 x tp 2", 0),
        (COLUMNS["BERT"], "zero1 4", 1),
        (COLUMNS["ViT"], "fsdp 2 x tp 2, sequence", 0),
        (COLUMNS["ViT"], "ddp 4", 0),
        (VARIANTS[0][0], VARIANTS[0][1], 1),
        (VARIANTS[6][0], VARIANTS[6][1], 0),
        (VARIANTS[8][0], VARIANTS[8][1], 1),
        (VARIANTS[11][0], VARIANTS[11][1], 0),
    )
)
"""Every model and every plan at least once, in about a minute."""
