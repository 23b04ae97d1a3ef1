"""H04: an expert gets no token on some ranks, or on none.

Reported: where weights are gathered module by module, a rank whose expert has nothing to do leaves the gather out that
the others wait for; kernels hang on empty groups.
https://github.com/deepspeedai/DeepSpeed/issues/7461
https://github.com/NVIDIA-NeMo/Automodel/pull/935
https://github.com/pytorch/torchtitan/pull/1166
https://github.com/deepspeedai/DeepSpeed/pull/4966

Here: experts as stages have them, each with weights of its own, and a router that may leave some out.
"""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import Tensor, nn

from tests.field.against_one_device import Case, cluster_of, eager, train
from tests.field.stacks import INNER, WIDTH, Stack, case, said_in

EXPERTS = 4


class Experts(nn.Module):
    """Each word goes to the expert that its router likes best."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, INNER) / WIDTH**0.5)
        self.down = nn.Parameter(torch.randn(EXPERTS, INNER, WIDTH) / INNER**0.5)

    def forward(self, x: Tensor) -> Tensor:
        gates = torch.softmax(self.router(x), -1)
        chosen = gates.argmax(-1, keepdim=True) == torch.arange(EXPERTS)
        made = torch.einsum("btef,efd->bted", torch.tanh(torch.einsum("btd,edf->btef", x, self.up)), self.down)
        return x + ((gates * chosen)[..., None] * made).sum(-2)


@cache
def left_out(expert: int | None) -> Case:
    """No word goes to an expert, in any block; None: all go to the first."""
    made = case(lambda: Stack(4, Experts))
    with torch.no_grad():
        for block in made.model.blocks:
            block.router.bias[expert if expert is not None else 0] += -1e3 if expert is not None else 1e3
    return made


PLANS = [("pp=2,fsdp=2", 4), ("pp=2,tp=2,schedule=zb-v", 4), ("pp=2,ddp=2,schedule=dualpipe", 4)]


@pytest.mark.parametrize("expert", [2, None])
@pytest.mark.parametrize(("plan", "ranks"), PLANS)
def test_trains_as_on_one_device(plan: str, ranks: int, expert: int | None) -> None:
    made, truth = left_out(expert), eager(left_out(expert))
    idle = [2] if expert is not None else [1, 2, 3]
    assert all(not truth.gradients[0][f"blocks.{n}.up"][idle].any() for n in range(4)), "nothing goes there"
    assert train(cluster_of(made, plan, ranks, 4), made).far_from(truth) < 1e-11


def test_what_is_said_does_not_depend_on_where_words_go(monkeypatch: pytest.MonkeyPatch) -> None:
    said = [
        said_in(cluster_of(made, "pp=2,fsdp=2", 4, 4), made.batches[0], monkeypatch)
        for made in (left_out(2), left_out(None), case(lambda: Stack(4, Experts)))
    ]
    assert said[0] == said[1] == said[2] and all(said[0].values())
