"""Compiled programs on real gloo ranks: the same numbers as on the virtual cluster, to rounding."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch

from meshwright.compiler.emit.artefact import write_artefact
from meshwright.compiler.emit.manifest import SourceDescription
from meshwright.compiler.graph.program import StepProgram
from meshwright.compiler.passes.compile import compile_step
from meshwright.compiler.passes.presets import preset
from meshwright.compiler.train_settings import TrainSettings
from meshwright.frontend.capture import capture
from meshwright.runtime.materialize import from_module
from meshwright.runtime.virtual import VirtualCluster
from tests.models import MODELS, Example, Variant
from tests.parallel.programs import train_artefact
from tests.parallel.ranks import run_ranks, values

STEPS = 2


@cache
def example() -> Example:
    return MODELS["GPT-2"](Variant(dropout=0.1), 0)


@cache
def program() -> StepProgram:
    model = example().model
    return capture(
        model, example().batch, optimizer=torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9), clip=0.5
    )


@pytest.mark.parametrize(
    ("ranks", "plan"), [pytest.param(4, "fsdp=2,tp=2", marks=pytest.mark.slow), (8, "ddp=2,fsdp=2,tp=2")]
)
def test_real_ranks_equal_the_virtual_cluster(ranks: int, plan: str, tmp_path: Path) -> None:
    made = replace(preset(plan, program(), ranks), microbatches=2)
    rank_program = compile_step(program(), made)
    write_artefact(rank_program, tmp_path / "build", SourceDescription("module", "tests.models"), TrainSettings())
    model, batch = example().model, example().batch
    saved = {n: p.detach().clone() for n, p in model.named_parameters(remove_duplicate=False)}
    saved |= {n: b.clone() for n, b in model.named_buffers()}
    cluster = VirtualCluster(rank_program, from_module(model), seed=3)
    expected = [cluster.step(batch) for _ in range(STEPS)]
    weights = cluster.full_parameters()
    found = values(run_ranks(ranks, train_artefact, str(tmp_path / "build"), saved, batch, STEPS, timeout=120))
    for history, whole in found:
        assert len(history) == STEPS
        for (loss, norm), step in zip(history, expected, strict=True):
            assert loss == pytest.approx(step.loss, rel=1e-6)
            assert norm == pytest.approx(step.norm, rel=1e-5)
        for name, tensor in weights.items():
            assert (whole[name] - tensor).abs().max() < 1e-6, name
            assert torch.equal(whole[name], found[0][1][name])
