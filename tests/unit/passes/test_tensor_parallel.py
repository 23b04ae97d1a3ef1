"""What tensor parallelism cuts: the same in every layer, and whole head groups where key/value heads are few."""

from __future__ import annotations

import copy

import pytest
import torch

import meshwright
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


class ByHand(torch.nn.Module):
    """Attention written as products: more channels in a head than there are heads."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = torch.nn.Linear(32, 96)
        self.out = torch.nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, _ = x.shape
        query, key, value = self.qkv(x).view(b, t, 4, 3, 8).unbind(3)
        query, key, value = (y.transpose(1, 2) for y in (query, key, value))
        weights = (query @ key.transpose(2, 3)).softmax(-1)
        out: torch.Tensor = self.out((weights @ value).transpose(1, 2).reshape(b, t, 32)).sum()
        return out


def test_heads_are_found_where_attention_is_written_as_products() -> None:
    program = capture(ByHand(), (torch.randn(2, 5, 32),))
    cut = tensor_cut(program, 2)
    # the channels of a head are summed in the scores, and to cut them would leave a sum larger than query and key
    assert [a.size for a in cut.dims["qkv.weight"][0]][:1] == [4]
    assert cut.cuts[cut.dims["qkv.weight"][0][0]] == ("tensor",)
    assert [a.size for a in cut.cuts] == [4]


class Residual(torch.nn.Module):
    """Square weights between values that are added to each other: both dims of each are one logical axis."""

    def __init__(self, experts: int) -> None:
        super().__init__()
        self.into = torch.nn.Linear(6, 8)
        shape = (experts, 8, 8) if experts else (8, 8)
        self.weights = torch.nn.ParameterList(torch.nn.Parameter(torch.randn(shape) / 4) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h: torch.Tensor = self.into(x)
        for weight in self.weights:
            if weight.dim() == 3:
                spread = h[:, None].expand(-1, weight.shape[0], -1, -1)
                h = h + torch.einsum("becd,edf->becf", spread, weight).tanh().sum(1)
            else:
                h = h + (h @ weight).tanh()
        return h.square().mean()


@pytest.mark.parametrize("plan", ["tp=2", "tp=3", "fsdp=2,tp=2", "fsdp=2,tp=2,micro=2"])
@pytest.mark.parametrize("experts", [0, 3])
def test_a_weight_with_one_logical_axis_twice_is_cut_once(experts: int, plan: str) -> None:
    torch.manual_seed(0)
    model = Residual(experts).double()
    alone = copy.deepcopy(model)
    batches = [torch.randn(8, 5, 6, dtype=torch.float64) for _ in range(2)]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    step = meshwright.parallelize(
        model, optimizer=optimizer, batch=batches[0], plan=plan, virtual=4 if "fsdp" in plan else int(plan[3:])
    )
    compute = step.rank_program.layouts["weights.1"].compute
    assert sum("tensor" in segment.axes for dim in compute.dims for segment in dim) == 1
    for batch in batches:
        loss = alone(batch)
        loss.backward()
        with torch.no_grad():
            for weight in alone.parameters():
                weight -= 0.5 * weight.grad
                weight.grad = None
        assert step(batch) == pytest.approx(loss.item(), rel=1e-12)
    whole = step.full_state_dict()
    for name, weight in alone.named_parameters():
        torch.testing.assert_close(whole[name], weight.detach(), rtol=1e-11, atol=1e-12)
