"""Indices of rows or classes that the model does not have are refused under every plan, as one device does."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from meshwright.compiler.diagnostics import MeshwrightError
from meshwright.compiler.passes.compile import compile_step
from meshwright.compiler.passes.presets import preset
from meshwright.frontend.capture import capture
from meshwright.runtime.materialize import from_module
from meshwright.runtime.virtual import VirtualCluster
from tests.models import MODELS, VOCABULARY, Variant


def told(model: str, plan: str, **changes: Tensor) -> str:
    made = MODELS[model](Variant(layers=1), 0)
    program = capture(made.model, made.batch, torch.optim.SGD(made.model.parameters(), lr=0.1))
    cluster = VirtualCluster(compile_step(program, preset(plan, program)), from_module(made.model))
    cluster.step(made.batch)
    with pytest.raises(MeshwrightError) as caught:
        cluster.step({**made.batch, **changes})
    (found,) = caught.value.diagnostics
    assert found.code == "E0613" and found.action
    return found.message


@pytest.mark.parametrize("plan", ["ddp=2", "tp=2"])
@pytest.mark.parametrize("model", ["Llama", "GPT-2", "BERT"])
def test_tokens(model: str, plan: str) -> None:
    tokens = MODELS[model](Variant(layers=1), 0).batch["input_ids"].clone()
    tokens[3, 2] = VOCABULARY
    assert told(model, plan, input_ids=tokens).startswith(f"'input_ids' of the batch holds {VOCABULARY}")


def test_targets() -> None:
    labels = MODELS["Llama"](Variant(layers=1), 0).batch["labels"].clone()
    labels[-1, -1] = -1
    assert told("Llama", "tp=2", labels=labels).startswith("'labels' of the batch holds -1")


def test_classes() -> None:
    labels = MODELS["ViT"](Variant(layers=1), 0).batch["labels"].clone()
    labels[1] = 7
    assert told("ViT", "ddp=2", labels=labels).endswith("classes 0 to 6")
