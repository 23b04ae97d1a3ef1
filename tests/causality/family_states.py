"""Chance that is not torch's, state in plain attributes, and outputs that only look like positions."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.causality.case import WIDTH, Attends, Tokens, expect, ids, lower

INF = float("-inf")


@expect("CAUSAL", train=True)
class DropsLayersByPythonsDice(Tokens):
    def mix(self, h: Tensor) -> Tensor:
        return h if random.random() < 0.5 else h.cumsum(1)


@expect("CAUSAL", train=True)
class MasksPositionsByNumpysDice(Tokens):
    def mix(self, h: Tensor) -> Tensor:
        made = h.clone()
        made[:, np.random.randint(h.shape[1])] = 0
        return made


@expect("CAUSAL UNDER ASSUMPTION", train=True)
class RouterBiasInAnAttribute(Tokens):
    """Read first, then moved by the load, for the next call."""

    def make(self) -> None:
        self.load = torch.zeros(WIDTH)

    def mix(self, h: Tensor) -> Tensor:
        chosen = (h + self.load.to(h)).argmax(-1)
        self.load = self.load + 0.1 * h.detach().mean((0, 1)).sign()
        return F.one_hot(chosen, WIDTH).to(h)


@expect("CAUSAL UNDER ASSUMPTION")
class CountsItsCalls(Tokens):
    calls = 0

    def mix(self, h: Tensor) -> Tensor:
        self.calls += 1
        return h * (1 + 1e-3 * self.calls)


@expect("LEAK", "future")
class LeaksFromTheSecondCallOn(Tokens):
    calls = 0

    def mix(self, h: Tensor) -> Tensor:
        self.calls += 1
        return h.flip(1) if self.calls > 1 else h


@expect("LEAK", "future", "batch")
class TakesItsScaleFromTheFirstBatch(Tokens):
    scale: Tensor | None = None

    def mix(self, h: Tensor) -> Tensor:
        if self.scale is None:
            self.scale = h.detach().std()
        return h / self.scale


@expect("CAUSAL")
class KeepsATableOfAngles(Attends):
    angles: Tensor | None = None

    def mix(self, h: Tensor) -> Tensor:
        n = h.shape[1]
        if self.angles is None or self.angles.shape[0] < n:
            self.angles = torch.outer(torch.arange(n, dtype=h.dtype), torch.ones(WIDTH, dtype=h.dtype)).cos()
        scores, v = self.scores(h * self.angles[:n])
        return scores.masked_fill(~lower(n), INF).softmax(-1) @ v


@expect("CAUSAL")
class KeepsMasksByLength(Attends):
    def make(self) -> None:
        super().make()
        self.masks: dict[int, Tensor] = {}

    def masked(self, scores: Tensor) -> Tensor:
        n = scores.shape[-1]
        if n not in self.masks:
            self.masks[n] = lower(n)
        return scores.masked_fill(~self.masks[n], INF)


@expect("CAUSAL", batch=lambda: ids(2, 32))
class ReturnsKeysOfTwelveHeads(Tokens):
    def forward(self, ids: Tensor) -> tuple[Tensor, Any]:
        h = self.embed(ids)
        q = F.pad(h, (0, 8)).unflatten(-1, (12, 2)).transpose(1, 2)
        made = (q @ q.transpose(2, 3)).masked_fill(~lower(h.shape[1]), INF).softmax(-1) @ q
        return self.head(made.transpose(1, 2).flatten(2)[..., :WIDTH]), (q, q)


@expect("CAUSAL", batch=lambda: ids(2, 32))
class ReturnsTwelvePooledNumbers(Tokens):
    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        h = self.embed(ids)
        return self.head(h), h.mean(1)[:, :12]


class _Turned(Tokens):
    """Logits in another layout than the input's."""

    def mix(self, h: Tensor) -> Tensor:
        return h.cumsum(1)


@expect("CAUSAL")
class PositionsLast(_Turned):
    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids).transpose(1, 2)


@expect("LEAK", "future")
class PositionsLastLeaks(Tokens):
    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.embed(ids).flip(1)).transpose(1, 2)


@expect("CAUSAL")
class AllTokensInOneDim(_Turned):
    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids).flatten(0, 1)


@expect("CAUSAL")
class AllTokensInOneDimPositionByPosition(_Turned):
    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids).transpose(0, 1).flatten(0, 1)


@expect("LEAK", "batch")
class AllTokensInOneDimLeaks(Tokens):
    def forward(self, ids: Tensor) -> Tensor:
        h = self.embed(ids)
        return self.head(h + h.mean(0)).flatten(0, 1)


def _typed() -> dict[str, Tensor]:
    given = ids()
    return {"ids": given, "types": given % 2}


@expect("CAUSAL UNDER ASSUMPTION", batch=_typed)
class ReadsKindsOfTokensOverAllPositions(Tokens):
    """Zeros and ones are taken for a mask, which is said where another position sees them."""

    def forward(self, ids: Tensor, types: Tensor) -> Tensor:
        return self.head(self.embed(ids) + self.embed(types).mean(1, keepdim=True))
