"""Capturing a deep model by its first layers gives what folding the whole capture gives."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshwright.compiler.analysis.blocks import Folded, fold
from meshwright.compiler.analysis.stand_ins import COPIES
from meshwright.compiler.analysis.summarize import summarize
from meshwright.compiler.cluster.presets import preset as preset_cluster
from meshwright.compiler.passes.compile import compile_step
from meshwright.compiler.passes.facts import program_facts
from meshwright.compiler.passes.presets import preset
from meshwright.compiler.passes.realise import Realiser
from meshwright.compiler.plan import Precision
from meshwright.compiler.prediction import Execution
from meshwright.compiler.search.candidate import Candidate
from meshwright.compiler.summary import RankSummary
from meshwright.frontend.capture import capture
from meshwright.frontend.capture.shallow import capture_folded, find_cuts, shallow
from meshwright.pricing import Pricer
from tests import deep_models
from tests.deep_models import Made, known


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.train().parameters(), lr=1e-3)


def cuts(made: Made) -> list[tuple[str, int]]:
    model, batch = made
    return [(cut.path, cut.kept) for cut in find_cuts(model, batch, adamw(model))]


def numbers(summary: RankSummary) -> Any:
    """A summary without the names of its nodes."""
    graphs = (summary.prologue, summary.micro, summary.update)
    items = [[(i.phase, i.block, i.work, i.reads, i.read_bytes) for i in g.items] for g in graphs]
    buffers = [[(b.bytes, b.kind, b.born, b.last, b.phase, b.block) for b in g.buffers] for g in graphs]
    rest = (summary.held, summary.accumulators, summary.repeats, summary.model_flops, summary.samples, summary.tokens)
    return items, buffers, rest


@pytest.mark.parametrize(
    "make,expected",
    [
        (lambda: known("GPT-2")(5), [("transformer.h", 2)]),
        pytest.param(lambda: deep_models.mixtral(4), [("model.layers", 2)], marks=pytest.mark.slow),
        pytest.param(lambda: deep_models.gemma3(9, "ssf"), [("model.layers", 6)], marks=pytest.mark.slow),
        pytest.param(
            lambda: deep_models.whisper(4),
            [("model.encoder.layers", 2), ("model.decoder.layers", 2)],
            marks=pytest.mark.slow,
        ),
    ],
    ids=["GPT-2", "Mixtral", "Gemma3", "Whisper"],
)
def test_the_summary_is_that_of_the_whole_capture(make: Callable[[], Made], expected: list[tuple[str, int]]) -> None:
    made = make()
    assert cuts(made) == expected
    model, batch = made
    optimizer = adamw(model)
    quick = capture_folded(model, batch, optimizer, clip=1.0)
    whole = capture(model, batch, optimizer, clip=1.0)
    folded = fold(whole)
    assert quick.repeats == folded.repeats and quick.groups == folded.groups
    assert {p.name: p for p in quick.parameters()} == {p.name: p for p in whole.parameters}
    assert quick.state() == whole.state and set(quick.blocks()) == set(folded.blocks())
    for text in ("fsdp=4", "ddp=2,tp=2"):
        plan = preset(text, folded.program, 4)
        first, second = (summarize(compile_step(f.program, plan, verify=False), f.repeats) for f in (quick, folded))
        assert numbers(first) == numbers(second), text


def test_model_and_optimizer_are_restored() -> None:
    model, batch = known("GPT-2")(5)
    optimizer = adamw(model)
    names = list(model.state_dict())
    group = optimizer.param_groups[0]["params"]
    found = find_cuts(model, batch, optimizer)
    with pytest.raises(RuntimeError), shallow(model, found, optimizer):
        assert len(model.transformer.h) == 2 and len(group) > len(optimizer.param_groups[0]["params"])
        raise RuntimeError
    assert list(model.state_dict()) == names and optimizer.param_groups[0]["params"] is group


def test_deep_seek_is_cut_behind_its_first_layers_with_experts() -> None:
    assert cuts(deep_models.deepseek(8)) == [("model.layers", 5)]


def test_the_first_block_of_t5_is_a_kind_of_its_own() -> None:
    assert cuts(deep_models.t5(6)) == [("encoder.block", 3), ("decoder.block", 3)]


def test_lists_within_blocks_are_found() -> None:
    assert cuts(deep_models.swin(8)) == [("swin.encoder.layers.1.blocks", 4)]


def test_a_layer_that_is_called_again_and_again_is_no_list() -> None:
    assert cuts(deep_models.albert(6)) == []
    made, batch = deep_models.albert(4)
    assert not capture_folded(made, batch, adamw(made), clip=1.0).repeats


def test_values_of_all_layers_read_at_the_end_forbid_to_cut() -> None:
    assert cuts(deep_models.mixtral(4, output_router_logits=True)) == []


class Stack(nn.Module):
    """Linear layers, run by a function of the model."""

    def __init__(self, run: Callable[[Stack, Tensor], Tensor], layers: list[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.depth = len(layers)
        self.run = run

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self, x).square().mean()


def linear(count: int) -> list[nn.Module]:
    return [nn.Linear(8, 8) for _ in range(count)]


def in_order(model: Stack, x: Tensor) -> Tensor:
    for layer in model.layers:
        x = x + layer(x)
    return x


def by_number(model: Stack, x: Tensor) -> Tensor:
    for i in range(model.depth):
        x = x + model.layers[i](x)
    return x


def backwards(model: Stack, x: Tensor) -> Tensor:
    for layer in reversed(model.layers):
        x = x + layer(x)
    return x


def scaled_by_depth(model: Stack, x: Tensor) -> Tensor:
    for layer in model.layers:
        x = x + layer(x) / len(model.layers)
    return x


def all_summed(model: Stack, x: Tensor) -> Tensor:
    total = torch.zeros_like(x)
    for layer in model.layers:
        x = x + layer(x)
        total = total + x
    return total


class Numbered(nn.Module):
    """A layer that acts by its number."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.index = index

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.linear(x)) if self.index % 4 == 3 else self.linear(x)


def batch() -> dict[str, Tensor]:
    return {"x": torch.randn(4, 8, generator=torch.Generator().manual_seed(0))}


@pytest.mark.parametrize("run", [by_number, backwards, scaled_by_depth, all_summed])
def test_a_forward_that_bears_no_cut_is_captured_whole(run: Callable[[Stack, Tensor], Tensor]) -> None:
    model = Stack(run, linear(5))
    assert cuts((model, batch())) == []
    quick = capture_folded(model, batch(), adamw(model), clip=1.0)
    folded = fold(capture(model, batch(), adamw(model), clip=1.0))
    assert quick.repeats == folded.repeats and quick.groups == folded.groups
    assert sorted(p.name for p in quick.parameters()) == sorted(n for n, _ in model.named_parameters())


def test_additions_between_layers_belong_to_no_layer() -> None:
    # outside of the layers as many additions are made as there are layers, so the shallow model does something else
    assert cuts((Stack(in_order, linear(5)), batch())) == []


class Residual(nn.Module):
    """A layer that does its addition itself."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)


def one_after_another(model: Stack, x: Tensor) -> Tensor:
    for layer in model.layers:
        x = layer(x)
    return x


def test_a_layer_that_acts_by_its_number_is_another_kind() -> None:
    layers = [Residual(Numbered(i)) for i in range(12)]
    assert cuts((Stack(one_after_another, list(layers)), batch())) == [("layers", 8)]


def test_a_layer_registered_twice_is_not_cut() -> None:
    shared = Residual(nn.Linear(8, 8))
    assert cuts((Stack(one_after_another, [shared] * 5), batch())) == []


def test_a_weight_shared_between_layers_is_not_cut() -> None:
    layers = [Residual(nn.Linear(8, 8)) for _ in range(5)]
    layers[4].inner.weight = layers[0].inner.weight  # type: ignore[assignment]  # a Linear
    assert cuts((Stack(one_after_another, list(layers)), batch())) == []


def test_layers_of_other_parameter_groups_are_other_kinds() -> None:
    model = Stack(one_after_another, [Residual(nn.Linear(8, 8)) for _ in range(8)])
    late = list(model.layers[4:].parameters())
    ids = {id(p) for p in late}
    groups = [{"params": [p for p in model.parameters() if id(p) not in ids]}, {"params": late, "lr": 1e-4}]
    found = find_cuts(model, batch(), torch.optim.AdamW(groups, lr=1e-3))
    assert [(c.path, c.kept) for c in found] == [("layers", 6)]


def test_more_copies_for_plans_that_treat_blocks_in_turns() -> None:
    model, given = known("Llama")(7)
    folded = capture_folded(model, given, adamw(model), clip=1.0, copies=3)
    turns = folded.refold({f"model.layers.{i}": i % 3 for i in range(7)})
    assert turns.repeats == {"model.layers.0": 3, "model.layers.1": 2, "model.layers.2": 2}


@cache
def by_first_layers_and_whole() -> tuple[Folded, Folded]:
    model, given = known("Llama")(11)
    optimizer = adamw(model)
    quick = capture_folded(model, given, optimizer, clip=1.0, copies=COPIES)
    return quick, fold(capture(model, given, optimizer, clip=1.0))


@pytest.mark.slow
@pytest.mark.parametrize("every", [2, 3, 7])
def test_plans_are_priced_as_from_the_whole_capture(every: int) -> None:
    quick, whole = by_first_layers_and_whole()
    assert quick.absent and not whole.absent
    cluster = preset_cluster("h100x4")
    assert cluster is not None
    for candidate in (
        Candidate((("data", 4),), 3, microbatches=1, save="nothing", every=every, prefetch=1),
        Candidate((("replica", 2), ("tensor", 2)), 0, microbatches=2, save="matmuls", every=every),
    ):
        one, other = (Pricer(f, Precision(), cluster, Execution()).price(candidate) for f in (quick, whole))
        assert one.seconds == pytest.approx(other.seconds, rel=0.01)
        assert sum(one.compute.values()) == pytest.approx(sum(other.compute.values()), rel=0.01)
        # what stands behind the last block that recomputes is kept a moment longer than in the whole step
        assert 0.99 * other.memory.peak <= one.memory.peak <= 1.05 * other.memory.peak
    assert program_facts(quick, Precision()) == program_facts(whole, Precision())


def test_a_plan_names_parameters_that_were_not_captured() -> None:
    model, given = known("Llama")(9)
    optimizer = adamw(model)
    quick, program = capture_folded(model, given, optimizer, clip=1.0), capture(model, given, optimizer, clip=1.0)
    candidate = Candidate((("tensor", 2),), 0, microbatches=1)
    facts = program_facts(quick, Precision())
    assert quick.source is not None
    made = Realiser(quick.source, Precision(), facts.blocks, quick.names()).plan(candidate)
    assert made.parameters == Realiser(program, Precision(), facts.blocks).plan(candidate).parameters
