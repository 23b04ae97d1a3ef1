"""What the ranks of a pipeline hold at most is what was predicted of them."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch

from meshwright.compiler.cluster.cluster import Cluster
from meshwright.compiler.cluster.cluster_file import read_cluster
from meshwright.compiler.graph.pipeline_program import PipelineProgram
from meshwright.compiler.graph.program import StepProgram
from meshwright.compiler.passes.pipeline import compile_plan
from meshwright.compiler.passes.presets import preset
from meshwright.frontend.capture import capture
from meshwright.prediction_of import predict_step
from tests.models import MODELS, Example, Variant
from tests.one_rank import measure_stages
from tests.unit.separability.models import Balances, Norms


@cache
def example() -> Example:
    return MODELS["Llama"](Variant(layers=4), 0)


@cache
def program() -> StepProgram:
    model = example().model
    return capture(model, example().batch, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3), clip=1.0)


def without_staging(ranks: int) -> Cluster:
    """Devices whose communication library copies nothing, as that of :func:`measure_stages`."""
    local = read_cluster("local", ranks)
    tiers = (
        replace(tier, collectives=tuple(replace(c, staging=0.0, passing=0.0) for c in tier.collectives))
        for tier in local.tiers
    )
    return replace(local, tiers=tuple(tiers))


@pytest.mark.parametrize(
    "plan",
    [
        pytest.param("pp=2,micro=4", marks=pytest.mark.slow),
        "pp=2,tp=2,micro=4,schedule=zb-h1",
        pytest.param("pp=2,ddp=2,micro=4,schedule=interleaved", marks=pytest.mark.slow),
        pytest.param("pp=2,micro=4,recompute", marks=pytest.mark.slow),
        pytest.param("pp=4,fsdp=2,micro=4", marks=pytest.mark.slow),
        "pp=2,fsdp=2,micro=4,selective",
        pytest.param("pp=2,micro=8,schedule=dualpipe-v", marks=pytest.mark.slow),
    ],
)
def test_peak_memory_is_as_predicted(plan: str) -> None:
    made = preset(plan, program())
    compiled = compile_plan(program(), made)
    predicted = predict_step(program(), made, without_staging(made.mesh.ranks))
    assert isinstance(compiled, PipelineProgram) and predicted.flow is not None
    for pipe, wanted in enumerate(predicted.flow.memory):
        measured = measure_stages(compiled, example().model, example().batch, pipe)
        assert wanted == pytest.approx(measured, rel=0.03), f"rank {pipe} of the pipeline"


@pytest.mark.parametrize(
    ("model", "plan"),
    [
        (Norms, "pp=2,micro=4,schedule=gpipe"),
        (Balances, "pp=2,ddp=2,micro=8,schedule=gpipe"),
        pytest.param(Norms, "pp=2,ddp=2,micro=8,schedule=breadth-first", marks=pytest.mark.slow),
        pytest.param(Balances, "pp=2,micro=4,schedule=breadth-first", marks=pytest.mark.slow),
        pytest.param(Norms, "pp=2,micro=4,schedule=gpipe,recompute", marks=pytest.mark.slow),
        pytest.param(Balances, "pp=2,micro=4,schedule=gpipe,recompute", marks=pytest.mark.slow),
    ],
)
def test_what_microbatches_keep_that_meet(model: type[Norms] | type[Balances], plan: str) -> None:
    """An estimate: when in a round what is let go of is not followed."""
    torch.manual_seed(0)
    one = model(4, 64)
    batch = {"x": torch.randn(512, 64)}
    step = capture(one, batch, optimizer=torch.optim.AdamW(one.parameters(), lr=1e-3), clip=1.0)
    made = preset(f"{plan},separability=global", step)
    compiled = compile_plan(step, made)
    predicted = predict_step(step, made, without_staging(made.mesh.ranks))
    assert isinstance(compiled, PipelineProgram) and predicted.flow is not None
    for pipe, wanted in enumerate(predicted.flow.memory):
        assert wanted == pytest.approx(measure_stages(compiled, one, batch, pipe), rel=0.16), f"rank {pipe}"
