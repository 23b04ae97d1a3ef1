"""S01: fewer key/value heads than tensor-parallel ranks.

Reported: grouped-query models were split by columns into less than one head per rank; loading succeeded and the
first forward failed in a reshape that mentions no head.
https://github.com/pytorch/torchtitan/issues/2574
https://github.com/huggingface/transformers/issues/48307
https://github.com/hiyouga/LlamaFactory/pull/10794
https://github.com/aws-neuron/aws-neuron-sdk/issues/1289
"""

from __future__ import annotations

from functools import cache

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.field.against_one_device import Case, Trained, cluster_of, eager, train

HEADS, GROUPS, CHANNELS, WIDTH, TIME = 8, 2, 4, 24, 6


class Attention(nn.Module):
    """Grouped-query attention with 8 query and 2 key/value heads, in the three ways in which people write it."""

    def __init__(self, style: str) -> None:
        super().__init__()
        self.style = style
        self.q = nn.Linear(WIDTH, HEADS * CHANNELS)
        self.k = nn.Linear(WIDTH, GROUPS * CHANNELS)
        self.v = nn.Linear(WIDTH, GROUPS * CHANNELS, bias=False)
        self.o = nn.Linear(HEADS * CHANNELS, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        q, k, v = (f(x).view(b, t, -1, CHANNELS).transpose(1, 2) for f in (self.q, self.k, self.v))
        if self.style == "enable_gqa":
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        elif self.style == "repeat_interleave":
            k, v = (z.repeat_interleave(HEADS // GROUPS, 1) for z in (k, v))
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            k, v = (
                z[:, :, None].expand(b, GROUPS, HEADS // GROUPS, t, CHANNELS).reshape(b, HEADS, t, CHANNELS)
                for z in (k, v)
            )
            scores = q @ k.transpose(-2, -1) / CHANNELS**0.5
            scores = scores.masked_fill(torch.ones(t, t, dtype=torch.bool).tril().logical_not(), float("-inf"))
            y = scores.softmax(-1) @ v
        return (self.o(y.transpose(1, 2).reshape(b, t, -1)) ** 2).sum()


@cache
def case(style: str) -> Case:
    torch.manual_seed(0)
    model = Attention(style).double()
    return Case(model, [{"x": torch.randn(4, TIME, WIDTH, dtype=torch.float64)} for _ in range(2)], clip=1.0)


@cache
def truth(style: str) -> Trained:
    return eager(case(style))


@pytest.mark.parametrize("style", ["enable_gqa", "repeat_interleave", "expand"])
@pytest.mark.parametrize(("plan", "ranks"), [("tp=2", 2), ("tp=4", 4), ("tp=8", 8), ("tp=3", 3), ("ddp=2,tp=4,sp", 8)])
def test_trains_as_on_one_device(style: str, plan: str, ranks: int) -> None:
    """4 and 8 ranks share the heads in groups; 3 ranks divide neither 2 nor 8 and work by padding."""
    assert train(cluster_of(case(style), plan, ranks), case(style)).far_from(truth(style)) < 1e-11


@pytest.mark.parametrize(("ranks", "key", "query"), [(4, GROUPS, 4), (8, GROUPS, 8)])
def test_a_rank_holds_whole_heads(ranks: int, key: int, query: int) -> None:
    """Whole key/value heads, one copy for each group of query heads, and no rank without work."""
    cluster = cluster_of(case("enable_gqa"), f"tp={ranks}", ranks)
    for holdings in cluster.holdings:
        assert holdings.parameters["k.weight"].shape[0] == GROUPS * CHANNELS // key
        assert holdings.parameters["q.weight"].shape[0] == HEADS * CHANNELS // query
