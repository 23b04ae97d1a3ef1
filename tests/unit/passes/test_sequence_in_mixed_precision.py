"""Sequence sharding of a model that is computed in 16 bits and normalises in 32: sums are paid in 16 bits, once each.

A norm of Llama casts the residual stream to float32. What the stream owes is paid before the cast, in half the bytes,
and the stream itself is cut along time from there on: what blocks keep of it is divided by the tensor ranks.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from meshwright.compiler.analysis.summarize import summarize
from meshwright.compiler.graph.program import annotation
from meshwright.compiler.memory import memory
from meshwright.compiler.passes.compile import compile_step
from meshwright.compiler.passes.presets import preset
from meshwright.compiler.plan import Recompute, Save
from meshwright.compiler.summary import Message
from tests.unit.memory.small_models import BATCH, MIXED, TIME, WIDTH, program

STREAM = 2 * BATCH * TIME * WIDTH
LAYERS = 2


def test_every_product_is_reduced_once_in_16_bits() -> None:
    step = program("Llama", 0.0, MIXED)
    rank_program = compile_step(step, preset("tp=2,sp", step, precision=MIXED))
    items = summarize(rank_program).micro.items
    sent = [i.work for i in items if isinstance(i.work, Message) and i.phase == "forward"]
    reduced = [m for m in sent if m.kind == "reduce-scatter"]
    # the lookup in a cut table, and two products of each layer
    assert [(m.dtype, m.payload) for m in reduced] == [("bf16", STREAM)] * (1 + 2 * LAYERS)


def test_the_stream_owes_nothing() -> None:
    step = program("Llama", 0.0, MIXED)
    rank_program = compile_step(step, preset("tp=2,sp", step, precision=MIXED))
    for node in rank_program.micro.module.graph.nodes:
        note = annotation(node) if node.op == "call_function" else None
        if note is not None and note.phase == "forward" and note.sharding is not None and note.sharding.owed:
            name = str(node.target)
            assert "einsum" in name or "embedding" in name or "logsumexp" in name or "pick" in name, node.format_node()


@pytest.mark.parametrize("save", ["matmuls", "nothing"])
def test_what_recomputed_blocks_keep_is_divided(save: Save) -> None:
    step = program("Llama", 0.0, MIXED)
    kept = []
    for text in ("ddp=1", "tp=2,sp"):
        plan = replace(preset(text, step, precision=MIXED), recompute=(Recompute("model.layers.*", save),))
        summary = compile_step(step, plan, verify=False)
        most = [memory(summarize(summary, {"model.layers.1": n})).most["activations"] for n in (20, 21)]
        kept.append(most[1] - most[0])
    assert kept[1] == kept[0] / 2
