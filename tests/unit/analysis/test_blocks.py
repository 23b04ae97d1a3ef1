"""Folding: a deep model's folded step is the step of the shallow model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshwright.compiler.analysis.blocks import Folded, Unknown, fold, region_of
from meshwright.compiler.analysis.summarize import summarize
from meshwright.compiler.graph.program import Graph, StepProgram, annotation
from meshwright.compiler.graph.single import run_single
from meshwright.compiler.passes.compile import compile_step
from meshwright.compiler.passes.presets import preset
from meshwright.compiler.plan import Plan, Precision
from meshwright.compiler.summary import Kernel, Message
from meshwright.frontend.capture import capture
from meshwright.frontend.capture.fingerprint import fingerprint
from tests import deep_models
from tests.deep_models import Made, known

MIXED = Precision("bf16", "fp32", "fp32")


def captured(made: Made, precision: Precision | None = None) -> StepProgram:
    model, batch = made
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return capture(model.train(), batch, optimizer, clip=1.0, precision=precision)


MAKERS: dict[str, Callable[[int], Made]] = {
    "Mixtral": deep_models.mixtral,
    "T5": deep_models.t5,
    "Whisper": deep_models.whisper,
    "Swin": deep_models.swin,
}


def made_of(name: str, layers: int) -> Made:
    return MAKERS.get(name, known(name))(layers)


@cache
def step_of(name: str, layers: int, precision: Precision | None = None) -> StepProgram:
    """A step that several tests look at; none may change it."""
    return captured(made_of(name, layers), precision)


def ops(graph: Graph, blocks: bool = True) -> Counter[Any]:
    """Every op with its result, phase and block; names do not count."""
    nodes = [n for n in graph.module.graph.nodes if n.op != "output"]
    notes = [annotation(n) for n in nodes]
    calls = [str(n.target) if n.op == "call_function" else n.op for n in nodes]
    return Counter((c, a.shape, a.dtype, a.phase, a.block if blocks else "") for c, a in zip(calls, notes, strict=True))


def assert_same(folded: StepProgram, shallow: StepProgram, blocks: bool = True) -> None:
    for name in ("prologue", "micro", "update"):
        assert ops(getattr(folded, name), blocks) == ops(getattr(shallow, name), blocks), name
    labels = [{annotation(n).block for n in p.micro.module.graph.nodes} for p in (folded, shallow)]
    assert labels[0] == labels[1]
    assert folded.parameters == shallow.parameters
    assert folded.state == shallow.state and folded.buffers == shallow.buffers
    assert folded.constants.keys() == shallow.constants.keys()


@pytest.mark.parametrize(
    ("name", "precision"),
    [
        ("GPT-2", None),
        pytest.param("Llama", None, marks=pytest.mark.slow),
        pytest.param("ViT", None, marks=pytest.mark.slow),
        ("gpt.mw", None),
        ("Llama", MIXED),
        pytest.param("BERT", MIXED, marks=pytest.mark.slow),
    ],
)
def test_the_fold_of_six_layers_is_the_capture_of_two(name: str, precision: Precision | None) -> None:
    whole, shallow = step_of(name, 6, precision), step_of(name, 2, precision)
    folded = fold(whole)
    assert_same(folded.program, shallow)
    assert list(folded.repeats.values()) == [5] and not folded.unfolded
    if precision is None:
        assert fingerprint(folded.program) == fingerprint(shallow)


CASES: dict[str, tuple[tuple[str, int], tuple[str, int], list[tuple[int, tuple[str, ...]]]]] = {
    "experts": (
        ("Mixtral", 5),
        ("Mixtral", 2),
        [(5, ("model.layers.0", "model.layers.1"))],
    ),
    "a shared value with a gradient": (
        ("T5", 5),
        ("T5", 3),
        [(4, ("encoder.block.1", "encoder.block.2")), (4, ("decoder.block.1", "decoder.block.2"))],
    ),
    "encoder and decoder": (
        ("Whisper", 4),
        ("Whisper", 2),
        [
            (4, ("model.encoder.layers.0", "model.encoder.layers.1")),
            (4, ("model.decoder.layers.0", "model.decoder.layers.1")),
        ],
    ),
    "blocks within stages that alternate": (
        ("Swin", 6),
        ("Swin", 4),
        [
            (3, ("swin.encoder.layers.1.blocks.0", "swin.encoder.layers.1.blocks.2")),
            (3, ("swin.encoder.layers.1.blocks.1", "swin.encoder.layers.1.blocks.3")),
        ],
    ),
}


@pytest.mark.parametrize(
    "case",
    [pytest.param(c, marks=() if c == "experts" else pytest.mark.slow) for c in CASES],
)
def test_kinds_of_repetition(case: str) -> None:
    deep, shallow, groups = CASES[case]
    folded = fold(step_of(*deep))
    assert [(len(g.blocks), g.kept) for g in folded.groups] == groups
    # what is made once for all blocks stands in the last one of them, which is another one in the shallow model
    assert_same(folded.program, step_of(*shallow), blocks=case in ("experts", "encoder and decoder"))


@pytest.mark.slow
def test_kinds_that_alternate_are_folded_kind_by_kind() -> None:
    folded = fold(captured(deep_models.gemma3(9, "ssf")))
    assert [g.kept for g in folded.groups] == [
        ("model.layers.0", "model.layers.1"),
        ("model.layers.2", "model.layers.5"),
    ]
    assert folded.repeats == {"model.layers.1": 5, "model.layers.5": 2}
    unnamed = [Counter((op[0], op[1]) for op in ops(p.micro)) for p in (folded.program, captured(gemma_of_four()))]
    assert unnamed[0] == unnamed[1]


def gemma_of_four() -> Made:
    return deep_models.gemma3(4, "ssff")


@pytest.mark.slow
def test_dense_layers_before_layers_with_experts() -> None:
    folded = fold(captured(deep_models.deepseek(6)))
    assert folded.repeats == {"model.layers.1": 2, "model.layers.4": 2}


def test_what_the_folded_step_stands_for_is_known() -> None:
    whole = step_of("Llama", 5)
    folded = fold(whole)
    assert folded.parameters() == whole.parameters and folded.state() == whole.state
    assert sum(folded.repeats.get(region_of(b, 1), 1) for b in {annotation(n).block for n in calls(folded)}) == 1 + 5


def calls(folded: Folded) -> list[Any]:
    return [n for n in folded.program.micro.module.graph.nodes if n.op == "call_function"]


def test_the_given_step_is_left_as_it_is() -> None:
    whole = step_of("GPT-2", 4)
    before = fingerprint(whole)
    fold(whole)
    assert fingerprint(whole) == before


def test_treatments_make_kinds() -> None:
    whole = step_of("Llama", 5)
    saved = {f"model.layers.{i}": "nothing" if i % 3 == 0 else "all" for i in range(5)}
    folded = fold(whole, saved)
    assert folded.repeats == {"model.layers.2": 2}
    kept = {region_of(annotation(n).block, 1) for n in calls(folded)} - {""}
    assert kept == {"model.layers.0", "model.layers.1", "model.layers.2", "model.layers.3"}


def test_absent_blocks_are_counted_by_treatment() -> None:
    shallow = step_of("Llama", 2)
    absent = {"model.layers.1": tuple(f"model.layers.{i}" for i in range(2, 7))}
    assert fold(shallow, absent=absent).repeats == {"model.layers.1": 6}
    turns = {f"model.layers.{i}": i % 2 for i in range(7)}
    assert fold(shallow, turns, absent).repeats == {"model.layers.0": 4, "model.layers.1": 3}
    with pytest.raises(Unknown):
        fold(shallow, {f"model.layers.{i}": i % 3 for i in range(7)}, absent)


def test_what_the_absent_are_like_must_be_known() -> None:
    # the first block of T5 alone has the relative bias, so one more says nothing of further ones
    shallow = captured(deep_models.t5(2))
    with pytest.raises(Unknown):
        fold(shallow, absent={"encoder.block.1": ("encoder.block.2",)})


def test_values_of_all_layers_read_at_the_end_forbid_to_fold() -> None:
    whole = captured(deep_models.mixtral(4, output_router_logits=True))
    folded = fold(whole)
    assert folded.program is whole and not folded.repeats
    assert folded.unfolded and "model.layers" in folded.unfolded[0]


class Unlike(nn.Module):
    """Layers of different widths, and layers that a factor tells apart."""

    def __init__(self, widths: list[int], factors: list[float]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, w), nn.Linear(w, 8)) for w in widths)
        self.factors = factors

    def forward(self, x: Tensor) -> Tensor:
        for layer, factor in zip(self.layers, self.factors, strict=True):
            x = x + factor * layer(x)
        return x.square().mean()


@pytest.mark.parametrize("widths,factors", [([4, 5, 6, 7], [1.0] * 4), ([4] * 4, [1.0, 2.0, 3.0, 4.0])])
def test_unlike_layers_are_kept_and_told(widths: list[int], factors: list[float]) -> None:
    whole = captured((Unlike(widths, factors), {"x": torch.randn(4, 8)}))
    folded = fold(whole)
    if factors[0] == factors[1]:
        assert folded.program is whole and not folded.repeats
        assert folded.unfolded == ("layers: 4 blocks of 4 kinds, none of which comes more than 2 times",)
    else:  # what tells the layers apart is outside of them, so nobody can say what continues as what
        assert folded.program is whole and " like it: " in folded.unfolded[0]


def test_layers_of_other_parameter_groups_are_other_kinds() -> None:
    model, batch = known("Llama")(6)
    late = [
        p for n, p in model.named_parameters() if n.startswith("model.layers.4.") or n.startswith("model.layers.5.")
    ]
    ids = {id(p) for p in late}
    rest = [p for p in model.parameters() if id(p) not in ids]
    optimizer = torch.optim.AdamW([{"params": rest}, {"params": late, "weight_decay": 0.0}], lr=1e-3)
    folded = fold(capture(model.train(), batch, optimizer, clip=1.0))
    assert folded.repeats == {"model.layers.1": 3}
    assert [g.blocks for g in folded.groups] == [tuple(f"model.layers.{i}" for i in range(4))]


@pytest.mark.parametrize(
    ("name", "deep", "shallow"),
    [
        ("GPT-2", 4, 2),
        pytest.param("T5", 5, 3, marks=pytest.mark.slow),
        pytest.param("Whisper", 4, 2, marks=pytest.mark.slow),
    ],
)
def test_the_folded_step_computes_what_the_shallow_model_does(name: str, deep: int, shallow: int) -> None:
    """Loss, gradient norm, every gradient and every updated weight, sums of gradients over layers included."""
    model, batch = made_of(name, shallow)
    folded, small = fold(step_of(name, deep)).program, step_of(name, shallow)
    weights = {n: p.detach() for n, p in model.named_parameters()}
    buffers = dict(model.named_buffers())
    got, want = (run_single(p, weights, buffers, None, batch, seed=3) for p in (folded, small))
    torch.testing.assert_close(got.loss, want.loss)
    torch.testing.assert_close(got.norm, want.norm)
    for found, expected in ((got.gradients, want.gradients), (got.parameters, want.parameters)):
        assert found.keys() == expected.keys()
        for name, tensor in expected.items():
            torch.testing.assert_close(found[name], tensor, msg=name)


@pytest.mark.parametrize("text", ["fsdp=4", "fsdp=2,tp=2", "zero1=2,tp=2,micro=2"])
def test_plans_for_the_whole_step_fit_the_folded_one(text: str) -> None:
    whole = step_of("GPT-2", 5, MIXED)
    folded = fold(whole).program
    plan = preset(text, whole, 4, MIXED)
    assert replace(preset(text, folded, 4, MIXED), hashes=plan.hashes) == plan
    compiled = compile_step(folded, plan)
    assert set(compiled.layouts) == {p.name for p in folded.parameters}


def work(program: StepProgram, plan: Plan, repeats: Mapping[str, int]) -> Counter[Any]:
    """Operations and bytes of forward and backward by kind, each block as often as it stands for others."""
    found: Counter[Any] = Counter()
    for item in summarize(compile_step(program, plan, verify=False), repeats).micro.items:
        times, done = repeats.get(item.block, 1), item.work
        if isinstance(done, Kernel):
            found[item.phase, done.kind, "flops"] += round(times * done.flops)
            found[item.phase, done.kind, "bytes"] += times * (done.read + done.written)
        elif isinstance(done, Message):
            found[item.phase, done.kind, done.axes, "messages"] += times
            found[item.phase, done.kind, done.axes, "bytes"] += times * done.payload
    return found


@pytest.mark.parametrize("name", ["GPT-2", pytest.param("Llama", marks=pytest.mark.slow)])
def test_the_work_of_the_whole_step_is_that_of_the_folded_one_times_its_repeats(name: str) -> None:
    whole = step_of(name, 5, MIXED)
    folded = fold(whole)
    for text in ("ddp=2,tp=2", "fsdp=2,tp=2,sp,micro=2"):
        plan = preset(text, whole, 4, MIXED)
        assert work(whole, plan, {}) == work(folded.program, plan, folded.repeats), text
