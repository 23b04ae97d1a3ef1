"""Models that try to hide a leak, or that look as if they had one."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.causality.case import WIDTH, WORDS, Tokens, expect, lower


@expect("LEAK", "future")
class NumberOfMarkedTokens(Tokens):
    """Through a shape: how many tokens a mask leaves."""

    def forward(self, ids: Tensor) -> Tensor:
        h = self.embed(ids)
        counts = [row[row > WORDS // 2].shape[0] for row in ids]
        return self.head(h / torch.tensor(counts)[:, None, None].clamp(min=1))


@expect("LEAK", "future")
class LargestIndex(Tokens):
    def mix(self, h: Tensor) -> Tensor:
        where = h[..., 0].argmax(1)
        return h[torch.arange(h.shape[0]), where][:, None].detach()


@expect("LEAK", "future")
class CastOfAMean(Tokens):
    """A whole number that is zero for most weights."""

    def mix(self, h: Tensor) -> Tensor:
        return h * (h.mean((1, 2)) * 3).long()[:, None, None]


@expect("LEAK", "future")
class PositionsFromPadding(Tokens):
    """Positions begin after the padding, which is counted over the whole row, right-hand padding too."""

    def make(self) -> None:
        self.places = nn.Embedding(128, WIDTH)

    def forward(self, ids: Tensor) -> Tensor:
        pads = (ids == 0).sum(1, keepdim=True)
        t = (torch.arange(ids.shape[1]) - pads).clamp(min=0)
        return self.head(self.embed(ids) + self.places(t))


@expect("CAUSAL")
class PositionsFromPaddingBefore(PositionsFromPadding):
    def forward(self, ids: Tensor) -> Tensor:
        t = ((ids != 0).cumsum(1) - 1).clamp(min=0)
        return self.head(self.embed(ids) + self.places(t))


@expect("LEAK", "future")
class SortedAlongTime(Tokens):
    def mix(self, h: Tensor) -> Tensor:
        return h.sort(1).values


@expect("LEAK", "future")
class RankAlongTime(Tokens):
    def mix(self, h: Tensor) -> Tensor:
        return h[..., :1].argsort(1).argsort(1).to(h.dtype) * h


@expect("CAUSAL")
class SortedAndUnsorted(Tokens):
    def mix(self, h: Tensor) -> Tensor:
        order = h[..., 0].argsort(1)
        wide = order[..., None].expand(h.shape)
        return torch.zeros_like(h).scatter(1, wide, h.gather(1, wide).tanh())


@expect("LEAK", "future")
class SortedMixedAndUnsorted(Tokens):
    """In sorted order each looks at the one before it."""

    def mix(self, h: Tensor) -> Tensor:
        order = h[..., 0].argsort(1)
        wide = order[..., None].expand(h.shape)
        taken = h.gather(1, wide)
        return torch.zeros_like(h).scatter(1, wide, taken + taken.roll(1, 1))


@expect("LEAK", "future")
class SortedWithPositionOfRank(Tokens):
    """In sorted order each gets an embedding of its place there."""

    def make(self) -> None:
        self.places = nn.Embedding(256, WIDTH)

    def mix(self, h: Tensor) -> Tensor:
        order = h[..., 0].argsort(1)
        wide = order[..., None].expand(h.shape)
        taken = h.gather(1, wide) + self.places(torch.arange(h.shape[1]))
        return torch.zeros_like(h).scatter(1, wide, taken)


@expect("CAUSAL")
class TopKOfFeatures(Tokens):
    def mix(self, h: Tensor) -> Tensor:
        values, places = h.topk(4, -1)
        return torch.zeros_like(h).scatter(-1, places, values)


@expect("CAUSAL")
class TopKOfWords(Tokens):
    def forward(self, ids: Tensor) -> Tensor:
        logits = self.head(self.embed(ids).cumsum(1))
        low = logits.topk(5, -1).values[..., -1:]
        return logits.masked_fill(logits < low, float("-inf"))


@expect("LEAK", "future", "batch")
class QuantisedByOneScale(Tokens):
    def mix(self, h: Tensor) -> Tensor:
        scale = h.abs().amax() / 7
        return (h / scale).round() * scale


@expect("CAUSAL")
class QuantisedByOneScaleOfToken(Tokens):
    def mix(self, h: Tensor) -> Tensor:
        scale = h.abs().amax(-1, keepdim=True) / 7
        return (h / scale).round() * scale


@expect("LEAK", "future", "batch")
class LeakByBranch(Tokens):
    def mix(self, h: Tensor) -> Tensor:
        return h.tanh() if h.mean() > 0 else -h


@expect("LEAK", "future", "batch")
class LeakByReadNumber(Tokens):
    def mix(self, h: Tensor) -> Tensor:
        return h * h.amax().item()


@expect("CAUSAL")
class LearntGate(Tokens):
    def make(self) -> None:
        self.gate = nn.Linear(WIDTH, WIDTH)

    def mix(self, h: Tensor) -> Tensor:
        past = h.cumsum(1)
        return torch.where(self.gate(h) > 0, past, h)


@expect("LEAK", "future")
class LearntGateOnTheMean(LearntGate):
    def mix(self, h: Tensor) -> Tensor:
        return torch.where(self.gate(h) > 0, h.mean(1, keepdim=True), h)


@expect("CAUSAL", train=True)
class Dropout(Tokens):
    def mix(self, h: Tensor) -> Tensor:
        return F.dropout(h, 0.3, self.training).cumsum(1)


@expect("CAUSAL")
class EmbeddingOfBoundedNorm(Tokens):
    def make(self) -> None:
        self.embed = nn.Embedding(WORDS, WIDTH, max_norm=1.0)

    def mix(self, h: Tensor) -> Tensor:
        return h.cumsum(1)


@expect("LEAK", "future")
class CopiesOfTheSameToken(Tokens):
    """Counts how often each token occurs in the row, later ones too."""

    def forward(self, ids: Tensor) -> Tensor:
        same = (ids[:, :, None] == ids[:, None]).sum(-1, keepdim=True)
        return self.head(self.embed(ids) * same)


@expect("CAUSAL")
class CopiesOfTheSameTokenBefore(Tokens):
    def forward(self, ids: Tensor) -> Tensor:
        same = ((ids[:, :, None] == ids[:, None]) & lower(ids.shape[1])).sum(-1, keepdim=True)
        return self.head(self.embed(ids) * same)


@expect("LEAK", "future")
class HistogramOfTokens(Tokens):
    def forward(self, ids: Tensor) -> Tensor:
        counts = torch.stack([torch.bincount(row, minlength=WORDS) for row in ids])
        return self.head(self.embed(ids)) + counts[:, None]


@expect("LEAK", "batch")
class LargestOfTheBatch(Tokens):
    def mix(self, h: Tensor) -> Tensor:
        return h.amax(0, keepdim=True)


@expect("LEAK", "batch")
class NeighbouringRow(Tokens):
    def mix(self, h: Tensor) -> Tensor:
        return h.roll(1, 0)


@expect("LEAK", "batch", "future")
class FlattenedTogether(Tokens):
    """A convolution over the flattened batch, both ways."""

    def make(self) -> None:
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)

    def mix(self, h: Tensor) -> Tensor:
        return self.conv(h.reshape(-1, WIDTH).t()).t().reshape(h.shape)


@expect("LEAK", "batch")
class FlattenedTogetherCausally(FlattenedTogether):
    def mix(self, h: Tensor) -> Tensor:
        return self.conv(F.pad(h.reshape(-1, WIDTH).t(), (1, -1))).t().reshape(h.shape)


@expect("CAUSAL")
class ReturnsItsLossToo(Tokens):
    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.head(self.embed(ids).cumsum(1))
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()), logits


@expect("LEAK", "future")
class SecondOutputLeaks(Tokens):
    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        h = self.embed(ids)
        return self.head(h), h + h.mean(1, keepdim=True)


@expect("LEAK", "future")
class SeesTheNextToken(Tokens):
    """Targets shifted the wrong way and given to the model."""

    def forward(self, ids: Tensor) -> Tensor:
        following = torch.cat([ids[:, 1:], ids[:, :1]], 1)
        return self.head(self.embed(ids) + 0.01 * self.embed(following))


@expect("CAUSAL")
class TakesThePreviousToken(Tokens):
    def forward(self, ids: Tensor) -> Tensor:
        before = torch.cat([torch.zeros_like(ids[:, :1]), ids[:, :-1]], 1)
        return self.head(self.embed(ids) + self.embed(before))


@expect("CAUSAL")
class SplitsAndJoins(Tokens):
    def mix(self, h: Tensor) -> Tensor:
        a, b = h.split([WIDTH // 4, WIDTH - WIDTH // 4], -1)
        return torch.cat([b.cumsum(1), a.flip(-1)], -1).unfold(2, 4, 4).flatten(2)


@expect("CAUSAL")
class AveragePoolOfPast(Tokens):
    def mix(self, h: Tensor) -> Tensor:
        return F.avg_pool1d(F.pad(h.transpose(1, 2), (3, 0)), 4, 1).transpose(1, 2)


@expect("LEAK", "future")
class AveragePoolBothWays(Tokens):
    def mix(self, h: Tensor) -> Tensor:
        return F.avg_pool1d(h.transpose(1, 2), 3, 1, 1).transpose(1, 2)


@expect("LEAK", "future")
class InterpolatedFromHalf(Tokens):
    def mix(self, h: Tensor) -> Tensor:
        half = F.interpolate(h.transpose(1, 2), scale_factor=0.5, mode="linear")
        return F.interpolate(half, size=h.shape[1], mode="linear").transpose(1, 2)


class AttendsByPlaces(Tokens):
    """A mask of places that are counted from the tokens: later ones have higher places, unless they are padding."""

    def attend(self, h: Tensor, ids: Tensor, keep: Tensor) -> Tensor:
        return (h @ h.transpose(1, 2)).masked_fill(~keep, float("-inf")).softmax(-1).nan_to_num(0.0) @ h

    def forward(self, ids: Tensor) -> Tensor:
        real = ids != 0
        place = real.cumsum(1)
        keep = (place[:, None] <= place[:, :, None]) & real[:, None]
        h = self.embed(ids)
        return self.head(h + self.attend(h, ids, keep))


@expect("CAUSAL")
class MaskOfCountedPlaces(AttendsByPlaces):
    pass


@expect("CAUSAL")
class MaskOfCountedPlacesAdded(AttendsByPlaces):
    def attend(self, h: Tensor, ids: Tensor, keep: Tensor) -> Tensor:
        bias = torch.zeros(keep.shape).masked_fill(~keep, float("-inf"))
        return (h @ h.transpose(1, 2) + bias).softmax(-1).nan_to_num(0.0) @ h


@expect("LEAK", "future")
class MaskOfCountedPlacesWithPadding(AttendsByPlaces):
    """Padding has the place of the last token before it, and is seen by that."""

    def forward(self, ids: Tensor) -> Tensor:
        place = (ids != 0).cumsum(1)
        h = self.embed(ids)
        return self.head(h + self.attend(h, ids, place[:, None] <= place[:, :, None]))


@expect("CAUSAL")
class WithoutWhatItAdds(Tokens):
    """Nothing but a gradient comes of the mean."""

    def mix(self, h: Tensor) -> Tensor:
        mean = h.mean(1, keepdim=True)
        return h.cumsum(1) + (mean - mean.detach())


GATE = torch.zeros((), requires_grad=True)


@expect("LEAK", "future")
class ZeroGateOfNoModule(Tokens):
    def mix(self, h: Tensor) -> Tensor:
        return GATE * h.mean(1, keepdim=True)
