"""Deep models at the price of shallow ones: three layers are captured, and the second stands for all further ones.

That is what folding makes of a deep capture (tests/unit/analysis says so); here it saves the tests the capture.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache

import torch
import transformers

from meshwright.compiler.analysis.blocks import Folded, fold
from meshwright.compiler.analysis.summarize import model_flops
from meshwright.compiler.cluster.cluster import Cluster
from meshwright.compiler.cluster.presets import preset
from meshwright.compiler.graph.program import StepProgram
from meshwright.compiler.passes.facts import program_facts
from meshwright.compiler.plan import Precision
from meshwright.compiler.prediction import Execution
from meshwright.compiler.search.facts import ProgramFacts
from meshwright.compiler.search.limits import Limits
from meshwright.compiler.search.pin_text import parse_pins
from meshwright.compiler.search.search import Search, search
from meshwright.frontend.capture import capture
from meshwright.pricing import Pricer

MIXED = Precision("bf16", "fp32", "fp32")
KEPT = 3
SIZES = {
    "1B": (16, 2048, 32, 8, 8192, 128256), "8B": (32, 4096, 32, 8, 14336, 128256),
    "70B": (80, 8192, 64, 8, 28672, 128256), "405B": (126, 16384, 128, 8, 53248, 128256),
}  # fmt: skip
"""Layers, width, heads, key/value heads, inner width, vocabulary: the published shapes of Llama 3."""


def config(name: str, layers: int, time: int) -> transformers.LlamaConfig:
    _, width, heads, groups, inner, vocabulary = SIZES[name]
    return transformers.LlamaConfig(
        vocab_size=vocabulary, hidden_size=width, intermediate_size=inner, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=groups, max_position_embeddings=time,
        tie_word_embeddings=name == "1B", use_cache=False,
    )  # fmt: skip


@cache
def captured(name: str, batch: int, time: int = 4096, layers: int = KEPT) -> StepProgram:
    """A step of a Llama in mixed precision, of so many layers, on the meta device."""
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config(name, layers, time)).train()
        tokens = torch.empty(batch, time, dtype=torch.int64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    return capture(model, {"input_ids": tokens, "labels": tokens}, optimizer, None, 1.0, precision=MIXED)


@cache
def deep(name: str, batch: int, time: int = 4096) -> tuple[StepProgram, Folded, ProgramFacts]:
    """The step of the whole depth: the shallow program, folded, and the facts of the deep one."""
    program = captured(name, batch, time)
    folded = fold(program)
    layers = SIZES[name][0]
    (block,) = (b for b, n in folded.repeats.items() if n == KEPT - 1)
    shallow = program_facts(folded, program, MIXED)
    repeats = {b: n + layers - KEPT if n == KEPT - 1 else n for b, n in folded.repeats.items()}
    one = [p for p in program.parameters if p.name.startswith(block + ".")]
    more = (layers - KEPT) * sum(math.prod(p.spec.shape) for p in one)
    facts = replace(
        shallow,
        parameters=shallow.parameters + more,
        weights=shallow.weights + 4 * more,
        gradients=shallow.gradients + 4 * more,
        state=shallow.state + 8 * more,
        compute_weights=shallow.compute_weights + 2 * more,
        flops=model_flops(folded.program, repeats),
        blocks={"model.layers.*": layers},
        kernels=shallow.kernels * layers // KEPT,
    )
    return program, replace(folded, repeats=repeats), facts


@cache
def planned(name: str, batch: int, on: str | Cluster, *pins: str, time: int = 4096) -> Search:
    """The search for a model on a cluster. Recomputation is in all blocks or none: the rest needs a deep capture."""
    program, folded, facts = deep(name, batch, time)
    cluster = preset(on) if isinstance(on, str) else on
    assert cluster is not None
    limits = Limits(pins=replace(parse_pins(pins), every=1))
    return search(facts, cluster, cluster.ranks, limits, Pricer(program, folded, MIXED, cluster, Execution("kernels")))
