"""What is communicated beside the computation gives the same numbers, bit for bit."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from meshwright.compiler.graph import collectives
from meshwright.compiler.graph.program import StepProgram, annotation
from meshwright.compiler.passes.compile import compile_step
from meshwright.compiler.passes.presets import preset
from meshwright.compiler.plan import Plan, Precision, Recompute, Save
from meshwright.frontend.capture import capture
from meshwright.runtime.materialize import from_module
from meshwright.runtime.virtual import VirtualCluster
from tests.models import Variant
from tests.parity.harness import SEED, Task, adamw, captured, examples

LLAMA = Task("Llama")
DROPPING = Task("GPT-2", Variant(dropout=0.1), clip=None)

Numbers = tuple[float, float | None, dict[str, Tensor], dict[str, Tensor]]


def numbers(task: Task, plan: Plan, program: StepProgram) -> list[Numbers]:
    """Loss, norm, weights and optimizer state after every step."""
    model = copy.deepcopy(examples(task)[0].model)
    weights = from_module(model.float() if plan.precision.compute == "bf16" else model.double())
    cluster = VirtualCluster(compile_step(program, plan), weights, seed=SEED)
    found = []
    for example in examples(task):
        step = cluster.step(example.batch)
        found.append((step.loss, step.norm, cluster.full_parameters(), cluster.full_state()))
    return found


def check(task: Task, plan: Plan, program: StepProgram) -> None:
    expected, found = numbers(task, replace(plan, prefetch=0), program), numbers(task, plan, program)
    for before, after in zip(expected, found, strict=True):
        assert before[:2] == after[:2]
        for right, got in ((before[2], after[2]), (before[3], after[3])):
            assert right.keys() == got.keys()
            for name in right:
                assert torch.equal(right[name], got[name]), name


def made(task: Task, text: str, **changes: Any) -> Plan:
    return replace(preset(text, captured(task), 4), **{"prefetch": 1, **changes})


@pytest.mark.parametrize(
    ("text", "microbatches", "prefetch"),
    [
        ("fsdp=4", 1, 1),
        pytest.param("fsdp=4", 2, 2, marks=pytest.mark.slow),
        pytest.param("fsdp=2,tp=2,sp", 1, 2, marks=pytest.mark.slow),
        ("fsdp=2,tp=2,sp", 2, 1),
        ("ddp=2,fsdp=2", 1, 1),
        pytest.param("ddp=2,fsdp=2", 2, 1, marks=pytest.mark.slow),
        ("zero2=4", 2, 1),
        ("zero1=4", 1, 1),
        pytest.param("zero1=2,tp=2", 2, 1, marks=pytest.mark.slow),
        pytest.param("ddp=2,tp=2", 1, 1, marks=pytest.mark.slow),
        ("ddp=4", 1, 1),
        pytest.param("ddp=4", 2, 1, marks=pytest.mark.slow),
        ("tp=4", 1, 1),
    ],
)
def test_the_same_numbers(text: str, microbatches: int, prefetch: int) -> None:
    check(LLAMA, made(LLAMA, text, microbatches=microbatches, prefetch=prefetch), captured(LLAMA))


@pytest.mark.parametrize("text", [pytest.param("fsdp=4", marks=pytest.mark.slow), "fsdp=2,tp=2,sp"])
@pytest.mark.parametrize("save", ["nothing", "matmuls"])
def test_the_same_numbers_with_recomputation(text: str, save: Save) -> None:
    check(LLAMA, made(LLAMA, text, recompute=(Recompute("model.layers.*", save),)), captured(LLAMA))


@pytest.mark.parametrize("text", [pytest.param("fsdp=4", marks=pytest.mark.slow), "ddp=2,tp=2", "fsdp=2,tp=2"])
def test_the_same_numbers_with_dropout_and_tied_weights(text: str) -> None:
    check(DROPPING, made(DROPPING, text), captured(DROPPING))


@pytest.mark.parametrize(
    ("optimizer", "text"),
    [("SGD", "zero2=4"), *(pytest.param("Muon", text, marks=pytest.mark.slow) for text in ("zero1=4", "fsdp=4"))],
)
def test_the_same_numbers_with_other_optimizers(optimizer: str, text: str) -> None:
    task = Task("Llama", optimizer=optimizer, clip=None)
    check(task, made(task, text), captured(task))


@pytest.mark.parametrize("text", ["fsdp=4", pytest.param("ddp=4", marks=pytest.mark.slow)])
def test_the_same_numbers_in_mixed_precision(text: str) -> None:
    precision = Precision("bf16", "fp32", "fp32")
    first = examples(LLAMA)[0]
    program = capture(first.model, first.batch, adamw(first.model), clip=0.5, precision=precision)
    plan = replace(preset(text, program, 4), prefetch=1, precision=precision)
    check(LLAMA, plan, program)
    # the casts of a block's weights are gathered in one message, a block ahead
    nodes = compile_step(program, plan).micro.module.graph.nodes
    gathers = [n for n in nodes if n.target is collectives.all_gather_begin and annotation(n).block]
    assert len(gathers) == (2 * len({annotation(n).block for n in gathers}) if text == "fsdp=4" else 0)
