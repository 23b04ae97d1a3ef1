"""What tensor parallelism cuts: the same in every layer, and whole head groups where key/value heads are few."""

from __future__ import annotations

import pytest
import torch

from meshwright.compiler.graph.program import StepProgram
from meshwright.compiler.passes.tensor_parallel import tensor_cut
from meshwright.frontend.capture import capture
from tests.models import HEADS, KEY_VALUE_HEADS, MODELS, Variant


@pytest.fixture(scope="module")
def llama() -> StepProgram:
    example = MODELS["Llama"](Variant(layers=3), 0)
    return capture(example.model, example.batch, torch.optim.SGD(example.model.parameters(), lr=0.1))


@pytest.mark.parametrize("degree", [2, 3, 4])
def test_every_layer_is_cut_alike(llama: StepProgram, degree: int) -> None:
    cut = tensor_cut(llama, degree)
    for kind in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.down_proj"):
        axes = []
        for layer in range(3):
            dims = cut.dims[f"model.layers.{layer}.{kind}.weight"]
            axes.append([[cut.cuts.get(atom, ()) for atom in atoms] for atoms in dims])
        assert axes[0] == axes[1] == axes[2]
        assert any(cutting for dim in axes[0] for cutting in dim), f"{kind} is not cut"


def test_ranks_share_key_value_heads_when_those_are_fewer(llama: StepProgram) -> None:
    cut = tensor_cut(llama, HEADS)
    assert cut.axes == (("tensor", KEY_VALUE_HEADS), ("group", HEADS // KEY_VALUE_HEADS))
    assert tensor_cut(llama, KEY_VALUE_HEADS).axes == (("tensor", KEY_VALUE_HEADS),)
