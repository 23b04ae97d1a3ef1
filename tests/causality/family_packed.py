"""Several documents in a row."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.causality.case import WIDTH, Attends, expect, lower, packed

INF = float("-inf")


class Packed(Attends):
    def forward(self, ids: Tensor, seg: Tensor) -> Tensor:
        h = self.embed(ids)
        return self.head(h + self.over(h, seg))

    def over(self, h: Tensor, seg: Tensor) -> Tensor:
        s, v = self.scores(h)
        return s.masked_fill(~(lower(h.shape[1]) & self.seen(seg)), INF).softmax(-1) @ v

    def seen(self, seg: Tensor) -> Tensor:
        return seg[:, :, None] == seg[:, None]


@expect("CAUSAL", batch=packed, segments="seg")
class DocumentMask(Packed):
    pass


@expect("LEAK", "document", batch=packed, segments="seg")
class CausalMaskOnly(Packed):
    def seen(self, seg: Tensor) -> Tensor:
        return torch.ones((), dtype=torch.bool)


@expect("LEAK", "document", batch=packed, segments="seg")
class PositionResetOnly(Packed):
    def make(self) -> None:
        super().make()
        self.places = nn.Embedding(128, WIDTH)

    def over(self, h: Tensor, seg: Tensor) -> Tensor:
        t = torch.arange(h.shape[1]).expand(seg.shape)
        starts = torch.where(F.pad(seg[:, 1:] != seg[:, :-1], (1, 0)), t, 0).cummax(1).values
        s, v = self.scores(h + self.places(t - starts))
        return s.masked_fill(~lower(h.shape[1]), INF).softmax(-1) @ v


@expect("LEAK", "document", batch=packed, segments="seg")
class DocumentMaskAndConvolution(Packed):
    def make(self) -> None:
        super().make()
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3)

    def over(self, h: Tensor, seg: Tensor) -> Tensor:
        return super().over(self.conv(F.pad(h.transpose(1, 2), (2, 0))).transpose(1, 2), seg)


@expect("LEAK", "document", batch=packed, segments="seg")
class StateNotReset(Packed):
    def make(self) -> None:
        super().make()
        self.cell = nn.GRU(WIDTH, WIDTH, batch_first=True)

    def over(self, h: Tensor, seg: Tensor) -> Tensor:
        return self.cell(h)[0] + seg[..., None] * 0


@expect("CAUSAL", batch=packed, segments="seg")
class StateReset(Packed):
    def over(self, h: Tensor, seg: Tensor) -> Tensor:
        state, made = torch.zeros_like(h[:, 0]), []
        for t in range(h.shape[1]):
            if t:
                state = state * (seg[:, t] == seg[:, t - 1])[:, None]
            state = (state + h[:, t]).tanh()
            made.append(state)
        return torch.stack(made, 1)


@expect("LEAK", "future", batch=packed, segments="seg")
class DocumentMaskWithoutOrder(Packed):
    def over(self, h: Tensor, seg: Tensor) -> Tensor:
        s, v = self.scores(h)
        return s.masked_fill(~self.seen(seg), INF).softmax(-1) @ v


@expect("LEAK", "document", "future", batch=packed, segments="seg")
class NoMaskAtAll(Packed):
    def over(self, h: Tensor, seg: Tensor) -> Tensor:
        s, v = self.scores(h)
        return s.softmax(-1) @ v


@expect("CAUSAL", batch=packed, segments="seg")
class TotalsOfDocuments(Packed):
    """Each document sums itself, rather than a running sum that takes off what came before."""

    def over(self, h: Tensor, seg: Tensor) -> Tensor:
        mask = (lower(h.shape[1]) & self.seen(seg)).to(h.dtype)
        return mask @ h / mask.sum(-1, keepdim=True)


@expect("LEAK", "document", batch=packed, segments="seg")
class MaskOfNeighbouringDocuments(Packed):
    def seen(self, seg: Tensor) -> Tensor:
        return (seg[:, :, None] - seg[:, None]).abs() <= 1
