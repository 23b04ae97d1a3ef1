"""The predicted peak against what torch's allocator gives out while a step of one rank runs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from meshwright.compiler.analysis.summarize import summarize
from meshwright.compiler.memory import memory
from meshwright.compiler.passes.compile import compile_step
from meshwright.compiler.passes.presets import preset
from meshwright.compiler.plan import Recompute
from meshwright.compiler.summary import GraphSummary, Message
from tests.one_rank import measure
from tests.unit.memory.small_models import MIXED, batch, model, program

PLANS = ["ddp=2", "zero1=2", "zero2=2", "fsdp=2", "tp=2", "tp=2,sp", "fsdp=2,micro=4", "fsdp=2,tp=2,sp,micro=4"]


@pytest.mark.parametrize("text", PLANS)
@pytest.mark.parametrize("name", [pytest.param("GPT-2", marks=pytest.mark.slow), "Llama"])
def test_the_peak_of_every_graph(name: str, text: str) -> None:
    rank_program = compile_step(program(name), preset(text, program(name)))
    summary = summarize(rank_program)
    predicted, measured = memory(summary), measure(rank_program, model(name), batch(name))
    # tables of rotary frequencies are two buffers of the module, of which one is read
    assert sum(summary.held.values()) == pytest.approx(measured.held, abs=256)
    assert predicted.peak == pytest.approx(measured.peak, rel=0.01)
    assert predicted.by_graph["micro"] == pytest.approx(measured.by_graph["micro"], rel=0.01)
    assert predicted.by_graph["update"] == pytest.approx(measured.by_graph["update"], rel=0.02)


@pytest.mark.parametrize("text", ["fsdp=2,tp=2,sp,micro=4", "zero1=2"])
@pytest.mark.parametrize(
    ("what", "changes"),
    [
        ("prefetch", {"prefetch": 1}),
        ("recompute", {"recompute": (Recompute("**", "nothing"),)}),
        ("selective", {"recompute": (Recompute("**", "matmuls"),)}),
        ("offload", {"offload": ("state",)}),
    ],
)
def test_what_a_plan_may_say_besides(what: str, changes: dict[str, object], text: str) -> None:
    plan = replace(preset(text, program("GPT-2", 0.1)), **changes)  # type: ignore[arg-type]  # fields of Plan
    rank_program = compile_step(program("GPT-2", 0.1), plan)
    measured = measure(rank_program, model("GPT-2", 0.1), batch("GPT-2"))
    assert memory(summarize(rank_program)).peak == pytest.approx(measured.peak, rel=0.01)


@pytest.mark.parametrize("text", ["fsdp=2", "ddp=2,micro=4"])
@pytest.mark.parametrize("name", [pytest.param("GPT-2", marks=pytest.mark.slow), "Llama"])
def test_mixed_precision(name: str, text: str) -> None:
    """Products in bfloat16 are laid out anew within the kernels of some CPUs; that is not predicted."""
    mixed = program(name, 0.0, MIXED)
    rank_program = compile_step(mixed, preset(text, mixed, precision=MIXED))
    measured = measure(rank_program, model(name), batch(name))
    assert memory(summarize(rank_program)).peak == pytest.approx(measured.peak, rel=0.05)


@pytest.mark.parametrize(
    ("text", "prefetch"), [(text, 0) for text in PLANS] + [(text, 1) for text in ("zero1=2", "fsdp=2,tp=2,sp,micro=4")]
)
def test_messages_are_those_that_are_sent_in_their_order(text: str, prefetch: int) -> None:
    plan = replace(preset(text, program("Llama")), prefetch=prefetch)
    rank_program = compile_step(program("Llama"), plan)
    summary = summarize(rank_program)
    (loss,) = (s for v, s in rank_program.micro.outputs.items() if v.kind == "loss")
    axes = tuple(a for a in rank_program.mesh.names if (a, "sum") in loss.partial)
    # between micro and update the executor pays what the loss owes
    paid = [("all-reduce", axes, 4)] if axes else []
    before = [*messages(summary.prologue), *(messages(summary.micro) * summary.microbatches)]
    measured = measure(rank_program, model("Llama"), batch("Llama"))
    assert list(measured.calls) == [*before, *paid, *messages(summary.update)]


def messages(graph: GraphSummary) -> list[tuple[str, tuple[str, ...], int]]:
    works = (item.work for item in graph.items)
    return [(w.kind, w.axes, w.payload) for w in works if isinstance(w, Message)]
