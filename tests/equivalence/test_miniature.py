"""The miniature of a plan: small, of the same kind, and told by numbers."""

from __future__ import annotations

import warnings
from dataclasses import replace
from functools import cache

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.compiler.diagnostics import InternalError, MeshwrightError
from meshwright.compiler.equivalence.check import check_relations
from meshwright.compiler.graph.program import StepProgram
from meshwright.compiler.passes.pipeline import compile_plan
from meshwright.compiler.passes.presets import preset
from meshwright.compiler.plan import Plan
from meshwright.frontend.capture import capture
from meshwright.miniature import miniature_of, run_miniature, verify_miniature
from tests.models import Variant
from tests.parity.harness import Task, captured

WIDTH, INNER, HEADS, VOCABULARY, TIME, BATCH, LAYERS = 4096, 16384, 32, 50304, 2048, 2048, 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.up = nn.Linear(WIDTH, INNER)
        self.down = nn.Linear(INNER, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        q, k, v = (y.view(b, t, HEADS, -1).transpose(1, 2) for y in self.qkv(self.norm(x)).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(b, t, WIDTH))
        return x + self.down(F.gelu(self.up(x)))


class Model(nn.Module):
    """A language model of some billions of parameters, written by hand, that nobody knows how to make smaller."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x)[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


@cache
def large() -> StepProgram:
    with torch.device("meta"):
        model = Model()
        batch = {n: torch.zeros(BATCH, TIME, dtype=torch.int64) for n in ("tokens", "labels")}
    return capture(model, batch, torch.optim.AdamW(model.parameters()), clip=1.0)


def planned(text: str, microbatches: int) -> Plan:
    return replace(preset(text, large()), microbatches=microbatches)


@pytest.mark.parametrize(
    ("text", "microbatches", "ranks"),
    [
        ("pp=8,fsdp=128,tp=8,sp,schedule=zb-h1,recompute", 8, 8),
        ("ddp=4,fsdp=256,tp=8,prefetch=1,offload", 1, 8),
        ("pp=2,ddp=16,fsdp=16,tp=8,schedule=1f1b", 4, 16),
    ],
)
def test_a_plan_for_thousands_of_ranks(text: str, microbatches: int, ranks: int) -> None:
    plan = planned(text, microbatches)
    assert plan.mesh.ranks >= 4096
    found, small = verify_miniature(large(), plan, steps=1)
    assert small.plan.mesh.ranks == ranks
    assert [name for name, _ in small.plan.mesh.axes] == [name for name, _ in plan.mesh.axes]
    assert found.passed, found
    assert not found.idle
    assert max(max(p.spec.shape) for p in small.program.parameters) < 200
    assert not small.notes
    kept = (small.plan.storage, small.plan.sequence, small.plan.prefetch, small.plan.offload, small.plan.batch)
    assert kept == (plan.storage, plan.sequence, plan.prefetch, plan.offload, plan.batch)
    assert bool(small.plan.recompute) == bool(plan.recompute)


def test_every_dim_has_two_elements_for_each_shard() -> None:
    small = miniature_of(large(), planned("fsdp=128,tp=8,sp", 4))
    for entry in small.plan.parameters:
        for _, _, segment in entry.compute.segments():
            if segment.axes:
                assert segment.size >= 2 * small.plan.mesh.size(*segment.axes)
    assert small.program.batch_size >= 2 * small.plan.microbatches * small.plan.mesh.size(*small.plan.batch)


def test_a_fault_of_the_compiler_shows_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from meshwright.compiler.passes import lower as lowering

    small = miniature_of(large(), planned("ddp=64,tp=8", 1))
    step = lowering._Lowering._step

    def without_sums(self: lowering._Lowering, x: object, made: lowering.Step) -> object:
        lost = made.kind == "all_reduce" and made.axes == ("tensor",)
        return x if lost else step(self, x, made)  # type: ignore[arg-type]

    monkeypatch.setattr(lowering._Lowering, "_step", without_sums)
    compiled = compile_plan(small.program, small.plan, verify=False)
    with pytest.raises(InternalError, match="rank 0 and rank 1 disagree"):
        run_miniature(small, compiled, steps=1)
    assert check_relations(compiled).findings
    with pytest.raises(MeshwrightError, match="E0740"):
        compile_plan(small.program, small.plan)


@pytest.mark.parametrize("model", ["Llama", *(pytest.param(m, marks=pytest.mark.slow) for m in ("BERT", "ViT")), "T5"])
def test_models_of_others(model: str) -> None:
    program = captured(Task(model, Variant(dropout=0.1)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found, small = verify_miniature(program, preset("fsdp=2,tp=2", program, 4))
    assert found.passed
    assert not found.idle
    pairs = zip(small.program.parameters, program.parameters, strict=True)
    assert sum(p.spec.shape != q.spec.shape for p, q in pairs) > 4


def test_labels_are_marked_unevenly() -> None:
    """So that a mean of means is another number than the mean."""
    program = captured(Task("Llama"))
    assert miniature_of(program, preset("ddp=2", program, 2)).ignored == {"labels": -100}
