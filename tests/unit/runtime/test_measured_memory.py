"""The memory of a step falls by what is predicted: against torch's own allocator."""

from __future__ import annotations

from functools import cache

import pytest
import torch
import transformers

from meshwright.compiler.analysis.summarize import summarize
from meshwright.compiler.graph.program import StepProgram
from meshwright.compiler.memory import memory
from meshwright.compiler.passes.compile import compile_step
from meshwright.compiler.passes.presets import preset
from meshwright.frontend.capture import capture
from meshwright.runtime.executor import Executor
from meshwright.runtime.feed import whole_batch
from meshwright.runtime.holdings import Holdings
from meshwright.runtime.materialize import from_module, materialize
from meshwright.runtime.rendezvous import Rendezvous
from meshwright.runtime.virtual import VirtualCommunicator
from tests.unit.runtime.allocated import most_allocated

TOKENS = torch.arange(4 * 64).remainder(97).view(4, 64)
BATCH = {"input_ids": TOKENS, "labels": TOKENS}
LAYERS = 3


@cache
def model() -> torch.nn.Module:
    config = transformers.GPT2Config(
        vocab_size=97, n_positions=64, n_embd=96, n_layer=LAYERS, n_head=4, bos_token_id=None, eos_token_id=None
    )
    return transformers.GPT2LMHeadModel(config).float().train()


@cache
def program() -> StepProgram:
    return capture(model(), BATCH, torch.optim.AdamW(model().parameters(), lr=1e-3), clip=1.0)


@cache
def peaks(words: str) -> tuple[int, int]:
    """The peak of a step as predicted, and as the allocator saw it."""
    rank_program = compile_step(program(), preset(f"ddp=1{words}", program(), 1))
    made: list[Holdings] = []
    before = most_allocated(lambda: made.extend(materialize(rank_program, from_module(model()), [{"replica": 0}])))
    mapped = sum(t.nbytes for _, t in made[0].items() if t.untyped_storage().nbytes() != t.nbytes)
    held = sum(t.nbytes for _, t in made[0].items()) - mapped
    assert held <= before
    executor = Executor(
        rank_program, VirtualCommunicator(0, rank_program.mesh, rank_program.plan.microbatches, Rendezvous(1)), made[0]
    )
    feed = whole_batch(BATCH, program())
    executor.step(feed, step=0)
    return memory(summarize(rank_program)).peak, held + most_allocated(lambda: executor.step(feed, step=1))


@pytest.mark.parametrize("words", [",recompute", ",selective", ",recompute=2", ",offload", ",selective,offload"])
def test_memory_falls_by_what_is_predicted(words: str) -> None:
    predicted, measured = (a - b for a, b in zip(peaks(""), peaks(words), strict=True))
    assert measured > 0.1 * peaks("")[1] or words == ",offload"
    assert predicted == pytest.approx(measured, rel=0.1)


def test_the_peak_itself_is_as_predicted() -> None:
    for words in ("", ",recompute", ",offload", ",micro=2", ",recompute,micro=4"):
        predicted, measured = peaks(words)
        assert predicted == pytest.approx(measured, rel=0.05)


def kept(words: str, block: str) -> int:
    """The bytes of activations of a block that live from its forward pass until backward begins."""
    micro = summarize(compile_step(program(), preset(f"ddp=1{words}", program(), 1))).micro
    backward = next(i for i, item in enumerate(micro.items) if item.phase == "backward")
    return sum(
        b.bytes for b in micro.buffers if b.block == block and b.kind == "activations" and b.born < backward <= b.last
    )


def test_what_a_block_keeps_is_what_the_field_counts() -> None:
    """In elements of ``s b h``: with nothing saved the stream; with matmuls saved the stream, 3 for queries, keys and
    values, 1 for attention, 1 behind it, 4 inside the MLP, and one number for each query and head."""
    element, heads = 4, 4
    stream = TOKENS.numel() * 96 * element
    blocks = [f"transformer.h.{i}" for i in range(LAYERS)]
    for block in blocks:
        assert kept(",recompute", block) == stream
        assert kept(",selective", block) == 10 * stream + TOKENS.numel() * heads * element
        assert kept("", block) > 20 * stream
    assert [kept(",recompute=2", b) == stream for b in blocks] == [True, False, True]
