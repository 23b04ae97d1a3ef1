"""Microbatches of one sample each, on one rank and on ranks of which each has one."""

from __future__ import annotations

import pytest
import torch

from meshwright.compiler.passes.compile import compile_step
from meshwright.compiler.passes.presets import preset
from meshwright.frontend.capture import capture
from meshwright.runtime.materialize import from_module
from meshwright.runtime.virtual import VirtualCluster
from tests.models import BATCH, MODELS, Variant


@pytest.mark.parametrize("plan", [f"zero1=1,micro={BATCH}", f"fsdp=2,micro={BATCH // 2}", f"ddp={BATCH}"])
def test_loss_of_single_samples(plan: str) -> None:
    made = MODELS["Llama"](Variant(layers=1), 0)
    program = capture(made.model, made.batch, torch.optim.SGD(made.model.parameters(), lr=0.1))
    cluster = VirtualCluster(compile_step(program, preset(plan, program)), from_module(made.model))
    found = cluster.step(made.batch)
    assert found.loss == pytest.approx(made.model(**made.batch).loss.item(), rel=1e-5)
