"""E06: capacity, dropping and padding depend on the local batch.

Reported: a limit that each rank counts for itself drops other tokens than one of the whole batch, so that results
change with the mesh; padding takes capacity until it is masked before routing.
https://github.com/deepseek-ai/DeepSeek-V2/issues/48
https://github.com/deepseek-ai/DeepSeek-MoE/issues/29
https://github.com/NVIDIA/Megatron-LM/pull/5542
https://github.com/laekov/fastmoe/issues/34

Here: what a model counts over its batch is counted over the whole batch whatever the mesh; a plan for which that cannot
be is refused.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.compiler.diagnostics import MeshwrightError
from meshwright.compiler.equivalence.check import check_relations
from tests.field.against_one_device import Case, cluster_of, eager, train

VOCABULARY, WIDTH, EXPERTS, PADDING = 16, 8, 2, 0


class Model(nn.Module):
    """Each token that is no padding goes to the expert that it likes best, while that has room."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.experts = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH))
        self.head = nn.Linear(WIDTH, VOCABULARY)
        with torch.no_grad():
            self.router.bias[0] += 2.0  # most tokens want the first

    def kept(self, tokens: Tensor) -> Tensor:
        gates = torch.softmax(self.router(self.embed(tokens)), -1)
        real = (tokens != PADDING)[..., None]
        wanted = F.one_hot(gates.argmax(-1), EXPERTS) * real
        capacity = tokens.numel() // EXPERTS
        place = wanted.flatten(0, 1).cumsum(0).view_as(wanted)
        return gates * wanted * (place <= capacity)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(tokens)
        x = x + torch.einsum("bte,btd,edf->btf", self.kept(tokens), x, self.experts)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def case() -> Case:
    torch.manual_seed(0)
    batches = [{n: torch.randint(1, VOCABULARY, (8, 6)) for n in ("tokens", "labels")} for _ in range(2)]
    for batch in batches:
        batch["tokens"][:, ::4] = PADDING  # a quarter and more
    return Case(Model().double(), batches)


def test_a_limit_of_the_local_batch_drops_others() -> None:
    made = case()
    model, tokens = made.model, made.batches[0]["tokens"]
    assert isinstance(model, Model)
    whole = model.kept(tokens) != 0
    halves = torch.cat([model.kept(half) != 0 for half in tokens.chunk(2)])
    assert not torch.equal(whole, halves)
    assert not whole[tokens == PADDING].any()


@pytest.mark.parametrize("plan", ["ddp=4", "ddp=2,fsdp=2", "zero1=4"])
def test_the_same_tokens_are_dropped_on_every_mesh(plan: str) -> None:
    made = case()
    cluster = cluster_of(made, plan)
    assert check_relations(cluster.rank_program).proved
    assert train(cluster, made).far_from(eager(made)) < 1e-9


def test_microbatches_would_change_what_is_dropped() -> None:
    with pytest.raises(MeshwrightError, match="E0305"):
        cluster_of(case(), "ddp=4", microbatches=2)
