"""What the field knows of the memory of transformers, from the programs of real modules.

Model state: Rajbhandari et al. 2020 ("ZeRO"), figure 1: 7.5B parameters on 64 devices take 120, 31.4, 16.6 and 1.9 GB.
Activations: Korthikanti et al. 2022 ("Reducing Activation Recomputation in Large Transformer Models"): a layer keeps
``s b h (34 + 5 a s / h)`` bytes in 16 bits, ``s b h (10 + (24 + 5 a s / h) / t)`` under tensor parallelism, all divided
by ``t`` with sequence parallelism, ``2 s b h`` with full recomputation.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch
import transformers

from meshwright.compiler.analysis.model_state import model_state_bytes
from meshwright.compiler.analysis.summarize import summarize
from meshwright.compiler.graph.program import StepProgram
from meshwright.compiler.memory import memory
from meshwright.compiler.passes.compile import compile_step
from meshwright.compiler.passes.layouts import layouts
from meshwright.compiler.passes.presets import preset
from meshwright.compiler.plan import Precision, Recompute
from meshwright.frontend.capture import capture

MIXED = Precision("bf16", "fp32", "fp32")


def gpt2(width: int, heads: int, time: int, batch: int, **more: object) -> StepProgram:
    """Two layers of GPT-2, computed in bfloat16, on the meta device."""
    config = transformers.GPT2Config(
        n_embd=width, n_head=heads, n_layer=2, n_positions=time, bos_token_id=None, eos_token_id=None, use_cache=False,
        activation_function="gelu", **more,
    )  # fmt: skip
    with torch.device("meta"):
        model = transformers.GPT2LMHeadModel(config).train()
        tokens = torch.zeros(batch, time, dtype=torch.int64)
    optimizer = torch.optim.AdamW(model.parameters())
    return capture(model, {"input_ids": tokens, "labels": tokens}, optimizer, clip=1.0, precision=MIXED)


@cache
def large() -> StepProgram:
    """7.5B parameters in 36 layers, two of which are there."""
    return gpt2(4096, 32, 1024, 64)


LARGE = {"transformer.h.1": 35}


def large_parameters() -> int:
    ddp = preset("ddp=1", large())
    return model_state_bytes(layouts(large(), ddp), ddp.mesh, (1, 0, 0), LARGE)


@pytest.mark.parametrize(("text", "published"), [("ddp", 120.0), ("zero1", 31.4), ("zero2", 16.6), ("zero3", 1.9)])
def test_model_state_of_seven_and_a_half_billion_parameters_on_64_devices(text: str, published: float) -> None:
    count = large_parameters()
    assert count == pytest.approx(7.5e9, rel=0.01)
    plan = preset(f"{text}=64", large())
    found = model_state_bytes(layouts(large(), plan), plan.mesh, repeats=LARGE)
    # the model has not just 7.5e9 parameters; per parameter it is what is published, to the digits that are given
    assert round(found / count * 7.5, 1) == published
    assert found / 1e9 == pytest.approx(published, rel=0.02)


@pytest.mark.parametrize(("text", "bytes_each"), [("ddp", 16.0), ("zero1", 8 + 8 / 64), ("zero3", 16 / 64)])
def test_what_our_programs_hold(text: str, bytes_each: float) -> None:
    """Weights and moments in 32 bits and, with several microbatches, a 32-bit accumulator; 16-bit copies are made."""
    plan = preset(f"{text}=64" if text != "ddp" else "ddp=64", large(), precision=MIXED)
    # one sample for each rank: the accumulators are what there would be of two microbatches
    summary = summarize(compile_step(large(), plan, verify=False), LARGE)
    state = summary.held["parameters"] + summary.held["optimizer state"]
    gradients = sum(b.bytes * LARGE.get(b.block, 1) for b in summary.update.buffers if b.kind == "gradients")
    assert (state + gradients) / large_parameters() == pytest.approx(bytes_each, rel=0.01)


TIME, BATCH, WIDTH, HEADS = 256, 8, 512, 8
STREAM = TIME * BATCH * WIDTH
"""``s b h``."""
SCORES = HEADS * TIME * TIME * BATCH
"""``a s s b``."""


@cache
def classic(attention: str) -> StepProgram:
    # the fused attention of the field has no dropout either
    drops = 0.1 if attention == "eager" else 0.0
    return gpt2(WIDTH, HEADS, TIME, BATCH, attn_implementation=attention, attn_pdrop=drops, vocab_size=256)


def layer_keeps(attention: str, text: str, recompute: tuple[Recompute, ...] = ()) -> int:
    """The bytes of activations that one more layer keeps."""
    program = classic(attention)
    plan = replace(preset(text, program, precision=MIXED), recompute=recompute)
    rank_program = compile_step(program, plan, verify=False)
    most = [memory(summarize(rank_program, {"transformer.h.1": n})).most["activations"] for n in (20, 21)]
    return most[1] - most[0]


# the published formula has a mask of one byte an element for each of two dropouts of the stream, and for that of the
# attention; ours are functions of an element's number and are not kept
MASKS, SCORE_MASKS = 2 * STREAM, SCORES
# it leaves out mean and inverse deviation of each of two normalisations, of two bytes a row
NORMS = 2 * 2 * 2 * TIME * BATCH
# and the logsumexp of a fused attention, of four bytes a row and head
LOGSUMEXP = 4 * TIME * BATCH * HEADS
NOTHING = (Recompute("**", "nothing"),)


def test_a_classic_layer() -> None:
    published = STREAM * (34 + 5 * HEADS * TIME / WIDTH)
    ours = layer_keeps("eager", "ddp=1")
    assert ours == published - MASKS - SCORE_MASKS + NORMS
    assert ours + MASKS + SCORE_MASKS == pytest.approx(published, rel=0.03)


def test_fused_attention_drops_the_second_term() -> None:
    assert layer_keeps("sdpa", "ddp=1") == 34 * STREAM - MASKS + NORMS + LOGSUMEXP


def test_tensor_and_sequence_parallelism_divide_it() -> None:
    published = STREAM * (34 + 5 * HEADS * TIME / WIDTH) / 4
    ours = layer_keeps("eager", "tp=4,sp")
    assert ours == published + (NORMS - MASKS - SCORE_MASKS) / 4


def test_tensor_parallelism_alone_leaves_the_stream_whole() -> None:
    published = STREAM * (10 + (24 + 5 * HEADS * TIME / WIDTH) / 4)
    assert layer_keeps("eager", "tp=4") == published + NORMS - MASKS - SCORE_MASKS / 4


def test_full_recomputation_keeps_the_stream() -> None:
    assert layer_keeps("eager", "ddp=1", NOTHING) == 2 * STREAM
    assert layer_keeps("sdpa", "tp=4,sp", NOTHING) == 2 * STREAM / 4


def test_recomputing_the_attention_alone_leaves_its_input() -> None:
    """Of the published layer, the attention's 11 s b h and all of its scores become the 2 s b h that it is given."""
    published = STREAM * (34 - 11 + 2)
    ours = layer_keeps("eager", "ddp=1", (Recompute("transformer.h.*.attn"),))
    assert ours == published - STREAM + NORMS, "one mask is left, that of the feed-forward part"
    assert ours == pytest.approx(published, rel=0.05)


def test_selective_recomputation_keeps_the_products() -> None:
    """Of 2 s b h: the input 1, queries, keys and values 3, the attention's result 1, those of two products 1 + 4."""
    kept = layer_keeps("sdpa", "ddp=1", (Recompute("**", "matmuls"),))
    assert kept == 10 * 2 * STREAM + LOGSUMEXP
