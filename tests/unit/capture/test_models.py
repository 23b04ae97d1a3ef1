"""Unmodified transformers models: two steps of the captured, widened program against eager PyTorch in float64."""

from __future__ import annotations

import pytest
import torch

from meshwright.compiler.graph.program import StepProgram
from meshwright.compiler.graph.single import run_single, widen
from meshwright.frontend.capture import capture
from tests.models import MODELS, Variant
from tests.reference import reference_steps
from tests.unit.capture.against_eager import close


def adamw(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def agrees(name: str, variant: Variant) -> StepProgram:
    example = MODELS[name](variant, 1)
    want = reference_steps(example.model, [example.batch] * 2, adamw, clip=0.5, seed=5)
    program = capture(example.model, example.batch, optimizer=adamw(example.model), clip=0.5)
    wide = widen(program)
    parameters = {p.name: example.model.get_parameter(p.name).detach().double() for p in program.parameters}
    buffers = {n: b.double() if b.is_floating_point() else b for n, b in example.model.named_buffers()}
    batch = {n: t.double() if t.is_floating_point() else t for n, t in example.batch.items()}
    state = None
    for number, step in enumerate(want):
        got = run_single(wide, parameters, buffers, state, batch, seed=5, step=number)
        assert got.loss.item() == pytest.approx(step.loss, rel=1e-11)
        assert got.norm.item() == pytest.approx(step.norm, rel=1e-11)
        assert set(got.gradients) == set(step.gradients)
        for parameter, grad in step.gradients.items():
            close(got.gradients[parameter], grad, f"gradient of {parameter}", 1e-11)
        for parameter, weight in step.weights.items():
            # AdamW divides by the root of a square: where a gradient is rounding, so is its direction
            close(got.parameters[parameter], weight, f"weight {parameter}", 1e-9)
        parameters, state = got.parameters, got.state
    return program


def calls(program: StepProgram, name: str) -> list[torch.fx.Node]:
    return [n for n in program.micro.module.graph.nodes if str(n.target) == f"meshwright.{name}.default"]


@pytest.mark.parametrize("name", ["GPT-2", "Llama", "Qwen3", "BERT", "ViT"])
def test_equals_eager(name: str) -> None:
    program = agrees(name, Variant())
    assert len(calls(program, "attention")) == 2
    for node in program.micro.module.graph.nodes:
        note = node.meta["meshwright"]
        if node.op == "call_function" and note.phase == "forward" and "attention" in str(node.target):
            assert note.block.rpartition(".")[2] in ("0", "1"), note
            assert note.origin.file.endswith(".py") and note.origin.line and note.origin.text
    backward = [n.meta["meshwright"] for n in calls(program, "attention_backward")]
    assert {n.phase for n in backward} == {"backward"}
    assert len({n.block for n in backward}) == 2 and all(n.origin.line for n in backward)


@pytest.mark.parametrize("name", ["GPT-2", "BERT"])
def test_equals_eager_with_dropout(name: str) -> None:
    program = agrees(name, Variant(dropout=0.2))
    sites = [n.args[3] for n in calls(program, "dropout")[: len(calls(program, "dropout")) // 2]]
    assert len(sites) == len(set(sites)) and sites, "each place has a number of its own"


def test_tied_weights_have_one_gradient() -> None:
    """Field case T01: one parameter under two names; its gradient is the sum over both uses."""
    program = agrees("GPT-2", Variant(tied=True))
    (tied,) = (p for p in program.parameters if p.aliases)
    assert (tied.name, tied.aliases) == ("transformer.wte.weight", ("lm_head.weight",))
    untied = agrees("GPT-2", Variant(tied=False))
    assert not any(p.aliases for p in untied.parameters)


@pytest.mark.parametrize("name", ["GPT-2", "Llama", "Qwen3"])
def test_causal_mask_is_a_flag(name: str) -> None:
    example = MODELS[name](Variant(), 1)
    program = capture(example.model, example.batch)
    for node in calls(program, "attention"):
        assert node.args[3] is None and node.args[5] is True and node.args[6] == 0
    assert not program.constants


def test_padding_mask_stays_data() -> None:
    example = MODELS["BERT"](Variant(), 1)
    program = capture(example.model, example.batch)
    assert all(isinstance(n.args[3], torch.fx.Node) for n in calls(program, "attention"))
    kinds = {v.name for v in program.prologue.signature.inputs}
    assert kinds == {"labels"}, "a mask that keeps the batch dim stays with its microbatch"
