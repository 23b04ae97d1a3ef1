"""A summary of two layers that stands for six needs the memory of six layers."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch
import transformers
from torch import nn

from meshwright.compiler.analysis.summarize import summarize
from meshwright.compiler.communication import communication
from meshwright.compiler.graph.program import StepProgram
from meshwright.compiler.memory import memory
from meshwright.compiler.passes.compile import compile_step
from meshwright.compiler.passes.presets import preset
from meshwright.compiler.plan import Recompute
from meshwright.compiler.summary import RankSummary
from meshwright.frontend.capture import capture
from meshwright.frontend.language import load
from tests.models import EXAMPLES

WIDTH, TIME, VOCABULARY, BATCH = 256, 32, 256, 8
DEEP = 6
LAST = {"GPT-2": "transformer.h.1", "Llama": "model.layers.1", "gpt.mw": "layers.1"}
"""The last of two layers."""


def model(name: str, layers: int) -> nn.Module:
    if name == "GPT-2":
        config = transformers.GPT2Config(
            vocab_size=VOCABULARY, n_positions=TIME, n_embd=WIDTH, n_layer=layers, n_head=4,
            bos_token_id=None, eos_token_id=None, use_cache=False,
        )  # fmt: skip
        return transformers.GPT2LMHeadModel(config)
    if name == "Llama":
        return transformers.LlamaForCausalLM(
            transformers.LlamaConfig(
                vocab_size=VOCABULARY,
                hidden_size=WIDTH,
                intermediate_size=3 * WIDTH,
                num_hidden_layers=layers,
                num_attention_heads=4,
                num_key_value_heads=2,
                max_position_embeddings=TIME,
                use_cache=False,
            )
        )
    sizes = {"t": TIME, "d": WIDTH, "f": 4 * WIDTH, "vocab": VOCABULARY, "layers": layers, "batch": BATCH, "h": 4}
    return load(str(EXAMPLES / name), {**sizes, "c": WIDTH // 4}).loss_module()


@cache
def program(name: str, layers: int, dtype: torch.dtype = torch.float32) -> StepProgram:
    tokens = torch.zeros(BATCH, TIME, dtype=torch.int64, device="meta")
    batch = {"tokens": tokens} if name.endswith(".mw") else {"input_ids": tokens, "labels": tokens}
    # a file of the language draws its own weights
    with torch.device("cpu" if name.endswith(".mw") else "meta"):
        made = model(name, layers).to(dtype).train()
    return capture(made, batch, torch.optim.AdamW(made.parameters(), lr=1e-3), clip=1.0)


def summaries(name: str, text: str, dtype: torch.dtype = torch.float32, **changes: object) -> list[RankSummary]:
    """Of all layers, and of two of them that stand for all."""
    found = []
    for layers, repeats in ((DEEP, {}), (2, {LAST[name]: DEEP - 1})):
        step = program(name, layers, dtype)
        plan = replace(preset(text, step), **changes)  # type: ignore[arg-type]  # fields of Plan
        found.append(summarize(compile_step(step, plan, verify=False), repeats))
    return found


PLANS = ["ddp=2", "zero1=2", "fsdp=2", "tp=2,sp", "ddp=2,micro=4", "fsdp=2,tp=2,sp,micro=4"]


@pytest.mark.parametrize("text", PLANS)
@pytest.mark.parametrize(
    "name", [*(pytest.param(name, marks=pytest.mark.slow) for name in ("GPT-2", "Llama")), "gpt.mw"]
)
def test_two_layers_stand_for_six(name: str, text: str) -> None:
    deep, folded = summaries(name, text)
    assert folded.held == deep.held
    assert folded.accumulators == deep.accumulators
    assert folded.model_flops == pytest.approx(deep.model_flops, rel=1e-12)
    for one, other in zip(communication(folded), communication(deep), strict=True):
        assert (one.graph, one.kind, one.axes) == (other.graph, other.kind, other.axes)
        if one.graph == "micro":
            assert one == other
        else:
            # what is small is joined over all layers in the update, and so does not scale
            assert one.payload == pytest.approx(other.payload, rel=1e-3, abs=2**17)
    all_of_it, found = memory(deep), memory(folded)
    assert found.peak == all_of_it.peak
    assert found.by_kind == all_of_it.by_kind
    assert found.by_graph["micro"] == all_of_it.by_graph["micro"]
    # sums over layers have fewer terms
    assert found.by_graph["update"] == pytest.approx(all_of_it.by_graph["update"], rel=2e-3)
    assert (found.at.graph, found.at.phase) == (all_of_it.at.graph, all_of_it.at.phase)


@pytest.mark.parametrize("save", [pytest.param("nothing", marks=pytest.mark.slow), "matmuls"])
@pytest.mark.parametrize("text", ["fsdp=2", "tp=2,sp,micro=2"])
def test_recomputed_layers(text: str, save: str) -> None:
    deep, folded = summaries("GPT-2", text, recompute=(Recompute("**", save),))  # type: ignore[arg-type]  # a Save
    assert memory(folded).peak == memory(deep).peak
    assert memory(folded).by_kind == memory(deep).by_kind


@pytest.mark.parametrize("save", [pytest.param("nothing", marks=pytest.mark.slow), "matmuls"])
def test_a_norm_behind_the_layers_that_keeps_a_wider_form_of_their_result(save: str) -> None:
    """Of the last layer that form is kept, of all others the result, from which the next layer is computed again."""
    recompute = (Recompute("**", save),)  # type: ignore[arg-type]  # a Save
    deep, folded = summaries("Llama", "ddp=2", torch.bfloat16, recompute=recompute)
    assert memory(folded).peak == memory(deep).peak
    assert memory(folded).by_kind == memory(deep).by_kind
    # where weights are gathered ahead the peak is at another layer, which keeps one result more or less
    deep, folded = summaries("Llama", "fsdp=2", torch.bfloat16, recompute=recompute, prefetch=1)
    assert memory(folded).peak == pytest.approx(memory(deep).peak, abs=2 * BATCH // 2 * TIME * WIDTH)


@pytest.mark.parametrize(
    ("name", "text"), [("Llama", "fsdp=2"), ("gpt.mw", "fsdp=2,tp=2,sp,micro=4"), ("Llama", "zero1=2")]
)
def test_layers_that_are_gathered_ahead(name: str, text: str) -> None:
    """A layer in the middle has others on both sides; of two layers none has."""
    deep, folded = summaries(name, text, prefetch=1)
    assert memory(folded).peak == memory(deep).peak
    assert memory(folded).by_kind == memory(deep).by_kind


def test_many_layers_take_no_longer() -> None:
    """Nothing is unrolled: a million layers are as quick as two."""
    _, folded = summaries("gpt.mw", "fsdp=2")
    few, many = (memory(replace(folded, repeats={"layers.1": n})) for n in (10**6, 2 * 10**6))
    assert many.most["activations"] - few.most["activations"] == 10**6 * (
        memory(replace(folded, repeats={"layers.1": 11})).most["activations"]
        - memory(replace(folded, repeats={"layers.1": 10})).most["activations"]
    )
