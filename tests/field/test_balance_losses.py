"""E06: balance losses of experts, products of means over the batch, that change with the number of microbatches.

Reported: the auxiliary loss is computed by each microbatch from its own tokens and averaged, or scaled by an axis of
the mesh, so that it is another loss than that of one device.
https://arxiv.org/abs/2501.11873
https://github.com/huggingface/transformers/issues/28255
"""

from __future__ import annotations

import copy

import pytest
import torch
import transformers
from torch import Tensor, nn

from meshwright.compiler.passes import separability
from meshwright.compiler.passes.pipeline import compile_plan
from meshwright.compiler.passes.presets import preset
from meshwright.runtime.materialize import from_module
from meshwright.verification import verify
from tests.field.against_one_device import Case, cluster_of, difference, eager, train

SIZES = {
    "vocab_size": 61, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 2, "num_experts_per_tok": 2, "output_router_logits": True, "router_aux_loss_coef": 0.3,
    "use_cache": False, "max_position_embeddings": 32,
}  # fmt: skip


class Switch(nn.Module):
    """One expert for each token, and the balance loss of the Switch Transformer over all tokens of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(6, 4)
        self.experts = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor, target: Tensor, mask: Tensor) -> Tensor:
        gates = self.router(x).softmax(-1)
        chosen = nn.functional.one_hot(gates.argmax(-1), 4).to(x.dtype)
        y = sum((e(x).relu() * (gates * chosen)[..., i, None] for i, e in enumerate(self.experts)), x)
        loss = nn.functional.cross_entropy(self.head(y).flatten(0, 1), target.flatten())
        tokens = mask.sum()
        share = (chosen * mask[..., None]).sum((0, 1)) / tokens
        weight = (gates * mask[..., None]).sum((0, 1)) / tokens
        return loss + 0.2 * 4 * (share * weight).sum()


def switch() -> Case:
    """Samples with unlike numbers of tokens, so that a mean of means is far off."""
    torch.manual_seed(0)
    batches = []
    for _ in range(2):
        mask = (torch.arange(6) < torch.tensor([6, 1, 2, 6, 5, 1, 3, 4])[:, None]).double()
        target = torch.where(mask > 0, torch.randint(3, (8, 6)), -100)
        batches.append({"x": torch.randn(8, 6, 6, dtype=torch.float64), "target": target, "mask": mask})
    return Case(Switch().double(), batches, clip=1.0)


@pytest.mark.parametrize(("plan", "ranks"), [("ddp=2,micro=2", 2), ("fsdp=2,micro=4", 2), ("ddp=2,fsdp=2,micro=2", 4)])
def test_of_the_whole_batch(plan: str, ranks: int) -> None:
    one = switch()
    declared = preset(f"{plan},separability=global", one.program)
    assert train(cluster_of(one, declared, ranks), one).far_from(eager(one)) < 1e-11


def test_over_ranks_alone_nothing_need_be_declared() -> None:
    assert difference(switch(), "fsdp=4") < 1e-11


class LossOf(nn.Module):
    """A causal language model that returns its loss, the balance loss of its experts in it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        loss: Tensor = self.model(input_ids=input_ids, labels=labels).loss
        return loss


def language_model(kind: str, experts: str, balance: bool = True, layers: int = 1) -> Case:
    torch.manual_seed(0)
    sizes = SIZES | {"output_router_logits": balance, "num_hidden_layers": layers}
    if kind == "Mixtral":
        model = transformers.MixtralForCausalLM(transformers.MixtralConfig(**sizes, num_local_experts=4))
    else:
        more = {"num_experts": 4, "moe_intermediate_size": 12, "head_dim": 4}
        model = transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**sizes, **more))
    model.set_experts_implementation(experts)
    batches = []
    for _ in range(2):
        tokens = torch.randint(61, (8, 6))
        labels = torch.where(torch.arange(6) < torch.tensor([6, 3, 2, 6, 5, 4, 3, 6])[:, None], tokens, -100)
        batches.append({"input_ids": tokens, "labels": labels})
    return Case(LossOf(model).double(), batches)


def worst(one: Case, plan: str) -> float:
    compiled = compile_plan(one.program, preset(plan, one.program))
    return verify(compiled, from_module(one.model), one.batches.__getitem__, lambda step: {}).worst


@pytest.mark.parametrize(
    ("kind", "experts"), [("Mixtral", "batched_mm"), pytest.param("Qwen3-MoE", "grouped_mm", marks=pytest.mark.slow)]
)
def test_of_published_models(kind: str, experts: str) -> None:
    one = language_model(kind, experts)
    (found,) = separability.findings(one.program)
    assert found.code == "E0761"
    assert worst(one, "fsdp=2,micro=4,separability=global") < 1e-10
    assert worst(one, "fsdp=2,tp=2,micro=2,separability=global") < 1e-10
    # that is in float64 throughout; these models compute rotary tables and their loss in float32
    assert near_eager(one) < 1e-5


@pytest.mark.parametrize(
    ("kind", "plan"),
    [
        ("Mixtral", "pp=2,micro=2,schedule=gpipe"),
        pytest.param("Mixtral", "pp=2,ddp=2,micro=2,schedule=gpipe", marks=pytest.mark.slow),
        pytest.param("Mixtral", "pp=2,micro=4,schedule=breadth-first", marks=pytest.mark.slow),
        pytest.param("Mixtral", "pp=2,ddp=2,micro=4,schedule=breadth-first", marks=pytest.mark.slow),
        pytest.param("Mixtral", "pp=4,micro=4,schedule=gpipe", marks=pytest.mark.slow),
        pytest.param("Mixtral", "pp=4,ddp=2,micro=2,schedule=gpipe", marks=pytest.mark.slow),
        pytest.param("Mixtral", "pp=2,fsdp=2,tp=2,micro=2,schedule=gpipe,recompute", marks=pytest.mark.slow),
        pytest.param("Qwen3-MoE", "pp=2,fsdp=2,micro=2,schedule=gpipe", marks=pytest.mark.slow),
    ],
)
def test_of_published_models_in_a_pipeline(kind: str, plan: str) -> None:
    """The gates of all layers go to the last stage, where microbatches meet before any goes back."""
    layers = 4 if "pp=4" in plan or "breadth" in plan else 2
    one = language_model(kind, "batched_mm" if kind == "Mixtral" else "grouped_mm", layers=layers)
    assert worst(one, f"{plan},separability=global") < 1e-10


@pytest.mark.parametrize("kind", [pytest.param("Mixtral", marks=pytest.mark.slow), "Qwen3-MoE"])
def test_published_models_that_sort_their_tokens_couple_nothing(kind: str) -> None:
    one = language_model(kind, "grouped_mm", balance=False)
    assert separability.findings(one.program) == ()
    assert worst(one, "fsdp=2,micro=4") < 1e-10
    assert near_eager(one) < 1e-5


def near_eager(one: Case) -> float:
    """On one rank, against eager PyTorch; there, with experts by another implementation, since torch's grouped product
    takes no float64."""
    model = copy.deepcopy(one.model)
    assert isinstance(model.model, transformers.PreTrainedModel)
    model.model.set_experts_implementation("batched_mm")
    truth = eager(Case(model, one.batches))
    return train(cluster_of(one, preset("ddp=1", one.program), 1), one).far_from(truth)
