"""Leaks confined to one place: a wrong element of a mask, the border of a chunk, one row, a position far along."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from tests.causality.case import WIDTH, Attends, Tokens, expect, ids, lower, packed

INF = float("-inf")


class _Chunked(Tokens):
    size, extra = 20, 1

    def mix(self, h: Tensor) -> Tensor:
        made = []
        for start in range(0, h.shape[1], self.size):
            keys = h[:, start : start + self.size + self.extra]
            count = min(self.size, h.shape[1] - start)
            mask = torch.ones(count, keys.shape[1], dtype=torch.bool).tril()
            if keys.shape[1] > count:
                mask[-1, -1] = True
            scores = keys[:, :count] @ keys.transpose(1, 2)
            made.append(scores.masked_fill(~mask, INF).softmax(-1) @ keys)
        return torch.cat(made, 1)


@expect("LEAK", "future", batch=lambda: ids(2, 32))
class ChunkSeesTheFirstOfTheNext(_Chunked):
    pass


@expect("CAUSAL", batch=lambda: ids(2, 32))
class ChunksApart(_Chunked):
    extra = 0


class _Registered(Attends):
    """A mask registered for the longest length, as many implementations have it."""

    size, wrong = 32, (20, 21)

    def make(self) -> None:
        super().make()
        mask = lower(self.size)
        mask[self.wrong] = True
        self.register_buffer("bias", mask)

    def masked(self, scores: Tensor) -> Tensor:
        n = scores.shape[-1]
        return scores.masked_fill(~self.bias[:n, :n], INF)


@expect("LEAK", "future", batch=lambda: ids(2, 32))
class RegisteredMaskWithOneWrongElement(_Registered):
    pass


@expect("CAUSAL", batch=lambda: ids(2, 32))
class RegisteredMask(_Registered):
    wrong = (21, 20)


@expect("LEAK", "future", batch=lambda: ids(2, 160))
class RegisteredMaskWrongBeyondTheShortLengths(_Registered):
    size, wrong = 160, (140, 150)


@expect("LEAK", "future", batch=lambda: ids(2, 600))
class WrongInABatchTooLargeToAnalyse(Tokens):
    def mix(self, h: Tensor) -> Tensor:
        made = h.clone()
        made[:, 417:418] += h[:, 418:419]
        return made


@expect("CAUSAL UNDER ASSUMPTION", batch=lambda: ids(2, 600), seconds=0.0)
class TooLargeToAnalyseInNoTime(Tokens):
    def mix(self, h: Tensor) -> Tensor:
        slow = h
        for _ in range(60):
            slow = slow.cumsum(1) / (1 + slow.abs().cumsum(1))
        return slow


@expect("LEAK", "future")
class OnePositionReadsTheNext(Tokens):
    def mix(self, h: Tensor) -> Tensor:
        made = h.cumsum(1)
        if h.shape[1] > 4:
            made[:, 3] += h[:, 4]
        return made


@expect("LEAK", "batch", batch=lambda: ids(8, 16))
class OnePositionOfOneRowReadsAnother(Tokens):
    def mix(self, h: Tensor) -> Tensor:
        made = h.clone()
        if h.shape[0] > 6:
            made[5, 7] += h[6, 3]
        return made


@expect("LEAK", "batch", batch=lambda: ids(32, 16))
class GroupOfRowsSeesTheFirstOfTheNext(Tokens):
    def mix(self, h: Tensor) -> Tensor:
        groups = [h[i : i + 16] for i in range(0, h.shape[0], 16)]
        for one, after in itertools.pairwise(groups):
            one += after[:1]
        return torch.cat(groups)


@expect("LEAK", "document", batch=packed, segments="seg")
class DocumentsComparedByTheirLastThreeBits(Attends):
    def forward(self, ids: Tensor, seg: Tensor) -> Tensor:
        self.seg = seg % 8
        return super().forward(ids)

    def masked(self, scores: Tensor) -> Tensor:
        same = self.seg[:, :, None] == self.seg[:, None, :]
        return scores.masked_fill(~(same & lower(scores.shape[-1])), INF)


@expect("CAUSAL UP TO ROUNDING")
class SolvesATriangleAsAFullMatrix(Tokens):
    """Weights drawn anew make the matrix so ill that roundings grow to the size of the output."""

    def mix(self, h: Tensor) -> Tensor:
        matrix = torch.tril(h @ h.transpose(1, 2) / WIDTH, -1) + torch.eye(h.shape[1], dtype=h.dtype)
        return torch.linalg.solve(matrix, h)
