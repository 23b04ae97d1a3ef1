"""Ops that torch does not know, functions, other layouts of the batch, masks that are given."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from tests.causality.case import LENGTH, WIDTH, Attends, Tokens, expect, floats, ids, lower, segments

INF = float("-inf")


@torch.library.custom_op("cases::running_sum", mutates_args=())
def running_sum(x: Tensor) -> Tensor:
    return x.cumsum(1)


@torch.library.custom_op("cases::centred", mutates_args=())
def centred(x: Tensor) -> Tensor:
    return x - x.mean(1, keepdim=True)


@expect("UNKNOWN")
class OpWithoutRule(Tokens):
    def mix(self, h: Tensor) -> Tensor:
        return running_sum(h)


@expect("LEAK", "future")
class OpWithoutRuleThatLeaks(Tokens):
    def mix(self, h: Tensor) -> Tensor:
        return centred(h)


@expect("CAUSAL")
class OpWithoutRuleInTheLossAlone(Tokens):
    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        h = self.embed(ids)
        return self.head(h.cumsum(1)), running_sum(h).sum()


@expect("CAUSAL")
class FlexibleAttention(Attends):
    def mix(self, h: Tensor) -> Tensor:
        q, k, v = (x.unsqueeze(1) for x in self.qkv(h).chunk(3, -1))
        n = h.shape[1]
        mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, n, n, device="cpu")
        return flex_attention(q, k, v, block_mask=mask)[:, 0]


@expect("LEAK", "future")
class FlexibleAttentionWithoutMask(Attends):
    def mix(self, h: Tensor) -> Tensor:
        q, k, v = (x.unsqueeze(1) for x in self.qkv(h).chunk(3, -1))
        return flex_attention(q, k, v, score_mod=lambda s, b, h, i, j: s - (i - j).abs())[:, 0]


@expect("CAUSAL")
class MappedOverTheBatch(Tokens):
    def mix(self, h: Tensor) -> Tensor:
        return torch.vmap(lambda x: x.cumsum(0))(h)


@expect("CAUSAL")
class Compiled(Tokens):
    def mix(self, h: Tensor) -> Tensor:
        return torch.compile(lambda x: x.cumsum(1))(h)


@expect("CAUSAL")
class TrainsItselfOnThePast(Tokens):
    """Each position takes a step of gradient descent on the one before it."""

    def make(self) -> None:
        self.w = nn.Parameter(torch.randn(WIDTH, WIDTH) / 4)

    def mix(self, h: Tensor) -> Tensor:
        slope = torch.func.grad(lambda w, x: ((x @ w - x) ** 2).sum())
        made = []
        for row in h:
            w = self.w
            for x in row[:12]:
                made.append(x @ w)
                w = w - 0.01 * slope(w, x)
        return F.pad(torch.stack(made).unflatten(0, (h.shape[0], -1)), (0, 0, 0, h.shape[1] - 12))


@expect("CAUSAL")
class InHalfPrecision(Attends):
    def make(self) -> None:
        super().make()
        self.to(torch.bfloat16)
        self.embed.to(torch.bfloat16)
        self.head.to(torch.bfloat16)

    def masked(self, s: Tensor) -> Tensor:
        return s.masked_fill(~lower(s.shape[-1]), torch.finfo(s.dtype).min)


@expect("LEAK", "future")
class ShuffledByChance(Tokens):
    def mix(self, h: Tensor) -> Tensor:
        return h[:, torch.randperm(h.shape[1])]


@expect("CAUSAL")
class BeginsWithATokenOfItsOwn(Tokens):
    def make(self) -> None:
        self.begin = nn.Parameter(torch.randn(1, 1, WIDTH))

    def forward(self, ids: Tensor) -> Tensor:
        h = torch.cat([self.begin.expand(ids.shape[0], -1, -1), self.embed(ids)], 1)
        return self.head(h.cumsum(1))


@expect("CAUSAL")
class WithoutTheLastPosition(Tokens):
    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.embed(ids).cumsum(1))[:, :-1]


@expect("CAUSAL")
class TableOfOneLength(Tokens):
    def make(self) -> None:
        self.places = nn.Parameter(torch.randn(LENGTH, WIDTH))

    def mix(self, h: Tensor) -> Tensor:
        return (h + self.places).cumsum(1)


@expect("LEAK", "future")
class MixedAtOneLength(Tokens):
    def make(self) -> None:
        self.places = nn.Linear(LENGTH, LENGTH)

    def mix(self, h: Tensor) -> Tensor:
        return self.places(h.transpose(1, 2)).transpose(1, 2)


def with_mask() -> dict[str, Any]:
    return {"ids": ids(), "bias": torch.full((LENGTH, LENGTH), INF).triu(1)}


@expect("CAUSAL", batch=with_mask)
class MaskIsGiven(Attends):
    def forward(self, ids: Tensor, bias: Tensor) -> Tensor:
        h = self.embed(ids)
        s, v = self.scores(h)
        return self.head(h + (s + bias).softmax(-1) @ v)


SEGMENTS = segments()


def with_documents() -> tuple[Tensor, Tensor]:
    return ids(), (SEGMENTS[:, :, None] == SEGMENTS[:, None]) & lower(LENGTH)


@expect("CAUSAL", batch=with_documents, segments=SEGMENTS)
class MaskOfDocumentsIsGiven(Attends):
    def forward(self, ids: Tensor, allowed: Tensor) -> Tensor:
        h = self.embed(ids)
        s, v = self.scores(h)
        return self.head(h + s.masked_fill(~allowed, INF).softmax(-1) @ v)


def with_positions() -> tuple[Tensor, Tensor]:
    return ids(), torch.cat(
        [(SEGMENTS[:, :t] == SEGMENTS[:, t : t + 1]).sum(1, keepdim=True) for t in range(LENGTH)], 1
    )


@expect("CAUSAL", batch=with_positions, segments=SEGMENTS)
class DocumentsBeginWherePositionsDo(MaskOfDocumentsIsGiven):
    def forward(self, ids: Tensor, places: Tensor) -> Tensor:
        document = (places == 0).cumsum(1)
        allowed = (document[:, :, None] == document[:, None]) & lower(ids.shape[1])
        return super().forward(ids, allowed)


@expect("CAUSAL")
class DocumentsBeginAfterAToken(MaskOfDocumentsIsGiven):
    """Which documents there are is told by the tokens themselves, each by those before it."""

    def forward(self, ids: Tensor) -> Tensor:
        document = (ids == 3).cumsum(1)
        return super().forward(ids, (document[:, :, None] == document[:, None]) & lower(ids.shape[1]))


def time_first() -> Tensor:
    return floats().transpose(0, 1).contiguous()


@expect("CAUSAL", batch=time_first, batch_dim=1, time_dim=0)
def positions_in_rows_causal(x: Tensor) -> Tensor:
    return x.cumsum(0)


@expect("LEAK", "batch", batch=time_first, batch_dim=1, time_dim=0)
def positions_in_rows(x: Tensor) -> Tensor:
    return x.cumsum(1)


@expect("LEAK", "future", batch=lambda: floats()[0], batch_dim=None, time_dim=0)
def one_row_alone(x: Tensor) -> Tensor:
    return x.flip(0)


WEIGHT = torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(0))


@expect("CAUSAL", batch=floats)
def closes_over_a_weight(x: Tensor) -> Tensor:
    return (x @ WEIGHT).cumsum(1)
