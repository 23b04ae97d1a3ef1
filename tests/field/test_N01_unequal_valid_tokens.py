"""N01: the mean of per-rank means where ranks have unequal numbers of valid tokens.

Reported: each rank averaged its loss over its own valid tokens, then gradients were averaged over ranks, so that
tokens on ranks with few valid ones weighed more.
https://github.com/pytorch/torchtitan/issues/1842
https://github.com/pytorch/torchtitan/pull/2206
https://github.com/PrimeIntellect-ai/prime-rl/pull/1957
https://github.com/PrimeIntellect-ai/prime-rl/pull/1961
"""

from __future__ import annotations

from functools import cache

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.field.against_one_device import Case, Trained, cluster_of, eager, train

VOCABULARY, WIDTH, TIME = 13, 8, 6
VALID = [5, 0, 1, 0, 0, 0, 6, 2]
"""Valid tokens of each sample. With ddp=4: 5, 1, 0, 8 by rank; two microbatches by rank: (5|0), (1|0), (0|0), (6|2).
With ddp=2 and two microbatches cut as [0-3][4-7]: the second rank of the first half has one."""


class Model(nn.Module):
    """The mean over valid tokens, by ``ignore_index`` or by a mask as people write it by hand."""

    def __init__(self, style: str) -> None:
        super().__init__()
        self.style = style
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.hidden = nn.Linear(WIDTH, 16)
        self.head = nn.Linear(16, VOCABULARY)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        logits = self.head(torch.tanh(self.hidden(self.embed(tokens))))
        flat = logits.flatten(0, 1)
        if self.style == "ignore_index":
            return F.cross_entropy(flat, labels.flatten())
        mask = labels.flatten() != -100
        each = F.cross_entropy(flat, labels.flatten().clamp(min=0), reduction="none")
        if self.style == "mask":
            return (each * mask).sum() / mask.sum()
        return (each * mask).sum() / mask.sum().clamp(min=1) + 1e-2 * (logits**2).mean()


@cache
def case(style: str, valid: tuple[int, ...] = tuple(VALID)) -> Case:
    torch.manual_seed(0)
    model = Model(style).double()
    batches = []
    for _ in range(2):
        tokens = torch.randint(VOCABULARY, (len(valid), TIME))
        kept = torch.arange(TIME)[None, :] < torch.tensor(valid)[:, None]
        batches.append({"tokens": tokens, "labels": torch.where(kept, tokens.flip(1), -100)})
    return Case(model, batches, clip=1.0)


@cache
def truth(style: str, valid: tuple[int, ...]) -> Trained:
    return eager(case(style, valid))


@pytest.mark.parametrize("style", ["ignore_index", "mask", "two means"])
@pytest.mark.parametrize(
    ("plan", "microbatches"), [("ddp=4", 1), ("ddp=4", 2), ("fsdp=4", 2), ("ddp=2,fsdp=2", 1), ("fsdp=2,tp=2", 4)]
)
def test_trains_as_on_one_device(style: str, plan: str, microbatches: int) -> None:
    found = train(cluster_of(case(style), plan, microbatches=microbatches), case(style))
    assert found.far_from(truth(style, tuple(VALID))) < 1e-11


@pytest.mark.parametrize("valid", [(5, 0, 0, 0), (0, 0, 0, 1), (6, 6, 0, 0)])
@pytest.mark.parametrize(("plan", "ranks", "microbatches"), [("ddp=2", 2, 1), ("ddp=2", 2, 2), ("ddp=4", 4, 1)])
def test_ranks_and_microbatches_without_any_valid_token(
    plan: str, ranks: int, microbatches: int, valid: tuple[int, ...]
) -> None:
    """A whole rank, or a whole microbatch, has nothing to learn from; none of it makes a NaN."""
    made = case("ignore_index", valid)
    found = train(cluster_of(made, plan, ranks, microbatches), made)
    assert found.far_from(truth("ignore_index", valid)) < 1e-11


def test_the_mean_of_means_would_be_seen() -> None:
    """The fault that was reported, made on purpose, is far outside the tolerance."""
    made = case("ignore_index")
    right = eager(made).gradients[0]
    wrong: dict[str, Tensor] = {}
    for rows in (slice(0, 2), slice(2, 4), slice(6, 8)):
        part = eager(Case(made.model, [{n: x[rows] for n, x in made.batches[0].items()}])).gradients[0]
        wrong = {n: wrong.get(n, torch.zeros_like(g)) + g / 3 for n, g in part.items()}
    assert max(float((wrong[n] - right[n]).abs().max() / right[n].abs().max()) for n in right) > 0.1
