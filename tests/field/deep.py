"""Deep models, captured by their first layers, and the planner's choice for them."""

from __future__ import annotations

from functools import cache

import torch
import transformers

from meshwright.compiler.analysis.blocks import Folded
from meshwright.compiler.analysis.stand_ins import COPIES
from meshwright.compiler.cluster.cluster import Cluster
from meshwright.compiler.cluster.presets import preset
from meshwright.compiler.plan import Precision
from meshwright.compiler.prediction import Execution
from meshwright.compiler.search.limits import Limits
from meshwright.compiler.search.pin_text import parse_pins
from meshwright.compiler.search.state import Search
from meshwright.frontend.capture.shallow import capture_folded
from meshwright.planning import plan_folded

MIXED = Precision("bf16", "fp32", "fp32")
SIZES = {
    "1B": (16, 2048, 32, 8, 8192, 128256), "8B": (32, 4096, 32, 8, 14336, 128256),
    "70B": (80, 8192, 64, 8, 28672, 128256), "405B": (126, 16384, 128, 8, 53248, 128256),
}  # fmt: skip
"""Layers, width, heads, key/value heads, inner width, vocabulary: the published shapes of Llama 3."""


def config(name: str, time: int) -> transformers.LlamaConfig:
    layers, width, heads, groups, inner, vocabulary = SIZES[name]
    return transformers.LlamaConfig(
        vocab_size=vocabulary, hidden_size=width, intermediate_size=inner, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=groups, max_position_embeddings=time,
        tie_word_embeddings=name == "1B", use_cache=False,
    )  # fmt: skip


@cache
def deep(name: str, batch: int, time: int = 4096) -> Folded:
    """A step of a Llama in mixed precision, on the meta device."""
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config(name, time)).train()
        tokens = torch.empty(batch, time, dtype=torch.int64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    batch_of = {"input_ids": tokens, "labels": tokens}
    return capture_folded(model, batch_of, optimizer, None, 1.0, precision=MIXED, copies=COPIES)


@cache
def planned(name: str, batch: int, on: str | Cluster, *pins: str, time: int = 4096) -> Search:
    """The search for a model on a cluster."""
    cluster = preset(on) if isinstance(on, str) else on
    assert cluster is not None
    limits = Limits(pins=parse_pins(pins))
    return plan_folded(
        deep(name, batch, time), cluster, limits=limits, precision=MIXED, execution=Execution("kernels")
    ).search
