"""The cells of the parity table of pipelines, models under schedules, and the few that every test run does."""

from __future__ import annotations

import math

from meshwright.compiler.schedules import catalogue
from tests.models import Variant
from tests.parity.harness import Cell, Task

MODELS = ("gpt.mw", "Llama", "Qwen3", "T5", "ViT")
SCHEDULES = tuple(catalogue.modules())
PIPES = (2, 4)
INNER = {"alone": "", "ddp 2": "ddp=2", "fsdp 2 x tp 2": "fsdp=2,tp=2"}
"""What each stage is cut over; by its name in the table, the words of the preset."""

LAYERS = {2: 3, 4: 7, 8: 9}
"""By stages, of which a rank has one or two: layers that do not come out even, so that stages differ."""


def pipeline_cell(model: str, schedule: str, pipe: int, inner: str) -> Cell:
    """Of a schedule of the catalogue on ``pipe`` ranks, twice as many microbatches, and ``inner`` of :data:`INNER`."""
    words = INNER[inner]
    ranks = pipe * math.prod(int(word.partition("=")[2]) for word in words.split(",") if word)
    plan = ",".join(filter(None, (f"pp={pipe}", words, f"schedule={schedule}")))
    layers = LAYERS[pipe * catalogue.virtual(schedule)]
    return Cell(Task(model, Variant(layers=layers, dropout=0.1)), plan, ranks, 2 * pipe)


COVERING = (
    ("gpt.mw", "1f1b", 4, "fsdp 2 x tp 2"),
    ("gpt.mw", "breadth-first", 2, "ddp 2"),
    ("gpt.mw", "dualpipe", 4, "alone"),
    ("Llama", "gpipe", 2, "fsdp 2 x tp 2"),
    ("Llama", "list", 2, "ddp 2"),
    ("Llama", "dualpipe", 2, "ddp 2"),
    ("gpt.mw", "interleaved", 2, "fsdp 2 x tp 2"),
    ("Qwen3", "zb-h2", 4, "alone"),
    ("gpt.mw", "zb-h1", 4, "ddp 2"),
    ("T5", "zb-v", 2, "fsdp 2 x tp 2"),
    ("T5", "dualpipe-v", 2, "alone"),
    ("gpt.mw", "interleaved-zb", 4, "alone"),
    ("ViT", "zb-v", 4, "ddp 2"),
)
"""Every model, schedule, number of ranks and inner plan at least once; few tasks, since each has to be captured."""

ON_PROCESSES = (
    ("Llama", "dualpipe", 2, "fsdp 2 x tp 2"),
    ("T5", "zb-v", 2, "fsdp 2 x tp 2"),
    ("gpt.mw", "1f1b", 4, "ddp 2"),
    ("Qwen3", "interleaved", 4, "ddp 2"),
    ("ViT", "zb-h2", 4, "ddp 2"),
    ("T5", "dualpipe-v", 4, "ddp 2"),
)
"""Those that real processes run too, eight of them; every test run does the first."""

ON_FOUR_PROCESSES = ("gpt.mw", "zb-h1", 4, "alone")
