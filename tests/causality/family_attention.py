"""Attention by masks of every make."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.causality.case import LENGTH, WIDTH, WORDS, Attends, Tokens, expect, ids, lower

INF = float("-inf")


@expect("CAUSAL")
class ByTril(Attends):
    def masked(self, s: Tensor) -> Tensor:
        return s.masked_fill(~lower(s.shape[-1]), INF)


@expect("CAUSAL")
class ByArangeAndWhere(Attends):
    def masked(self, s: Tensor) -> Tensor:
        t = torch.arange(s.shape[-1])
        return torch.where(t[:, None] >= t[None], s, INF)


@expect("CAUSAL")
class ByAttentionFlag(Attends):
    def mix(self, h: Tensor) -> Tensor:
        q, k, v = self.qkv(h).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)


@expect("CAUSAL")
class ByBooleanMaskOfTheFlag(Attends):
    def mix(self, h: Tensor) -> Tensor:
        q, k, v = self.qkv(h).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=lower(h.shape[1])).transpose(1, 2).flatten(2)


@expect("CAUSAL")
class SlidingWindow(Attends):
    def masked(self, s: Tensor) -> Tensor:
        t = torch.arange(s.shape[-1])
        d = t[:, None] - t[None]
        return s.masked_fill((d < 0) | (d >= 5), INF)


@expect("CAUSAL")
class ByBufferOfFixedSize(Attends):
    def make(self) -> None:
        super().make()
        self.register_buffer("mask", torch.full((LENGTH, LENGTH), INF).triu(1))

    def masked(self, s: Tensor) -> Tensor:
        return s + self.mask


@expect("CAUSAL")
class ByBufferThatIsCut(Attends):
    def make(self) -> None:
        super().make()
        self.register_buffer("mask", lower(64))

    def masked(self, s: Tensor) -> Tensor:
        n = s.shape[-1]
        return torch.where(self.mask[:n, :n], s, torch.finfo(s.dtype).min)


@expect("CAUSAL")
class ByMaskedExponential(Attends):
    def mix(self, h: Tensor) -> Tensor:
        s, v = self.scores(h)
        weights = s.exp() * lower(s.shape[-1])
        return (weights @ v) / weights.sum(-1, keepdim=True)


@expect("CAUSAL")
class BySoftmaxWrittenOut(Attends):
    def mix(self, h: Tensor) -> Tensor:
        s, v = self.scores(h)
        s = s.masked_fill(~lower(s.shape[-1]), torch.finfo(s.dtype).min)
        s = (s - s.amax(-1, keepdim=True)).exp()
        return (s / s.sum(-1, keepdim=True)) @ v


@expect("CAUSAL")
class SigmoidAttention(Attends):
    def mix(self, h: Tensor) -> Tensor:
        s, v = self.scores(h)
        return s.masked_fill(~lower(s.shape[-1]), INF).sigmoid() @ v


@expect("CAUSAL")
class WithAlibi(Attends):
    def masked(self, s: Tensor) -> Tensor:
        t = torch.arange(s.shape[-1])
        bias = -(t[:, None] - t[None]).abs() * 0.5
        return (s + bias).masked_fill(t[None] > t[:, None], INF)


@expect("LEAK", "future")
class AlibiWithoutMask(Attends):
    def masked(self, s: Tensor) -> Tensor:
        t = torch.arange(s.shape[-1])
        return s - (t[:, None] - t[None]).abs() * 0.5


@expect("CAUSAL")
class WithRotaryTables(Attends):
    def mix(self, h: Tensor) -> Tensor:
        q, k, v = self.qkv(h).chunk(3, -1)
        t = torch.arange(h.shape[1])[:, None] / 10.0 ** (torch.arange(WIDTH // 2) / 8)
        turn = torch.polar(torch.ones_like(t), t)
        q, k = (torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (-1, 2))) * turn).flatten(2) for x in (q, k))
        return (q @ k.transpose(1, 2)).masked_fill(~lower(h.shape[1]), INF).softmax(-1) @ v


@expect("CAUSAL")
class RelativeBuckets(Attends):
    def make(self) -> None:
        super().make()
        self.bias = nn.Embedding(8, 1)

    def masked(self, s: Tensor) -> Tensor:
        t = torch.arange(s.shape[-1])
        bucket = (t[:, None] - t[None]).clamp(0, 7)
        return (s + self.bias(bucket)[..., 0]).masked_fill(t[None] > t[:, None], INF)


@expect("CAUSAL")
class InBlocks(Attends):
    """Blocked attention with a running maximum and sum."""

    def mix(self, h: Tensor) -> Tensor:
        q, k, v = self.qkv(h).chunk(3, -1)
        n, size = h.shape[1], 4
        t = torch.arange(n)
        out = torch.zeros_like(q)
        total, most = q.new_zeros(*q.shape[:2], 1), q.new_full((*q.shape[:2], 1), -1e30)
        for start in range(0, n, size):
            keys = slice(start, min(start + size, n))
            s = q @ k[:, keys].transpose(1, 2)
            s = s.masked_fill(t[None, keys] > t[:, None], INF)
            new = torch.maximum(most, s.amax(-1, keepdim=True))
            weight, old = (s - new).exp(), (most - new).exp()
            out, total, most = out * old + weight @ v[:, keys], total * old + weight.sum(-1, keepdim=True), new
        return out / total


@expect("CAUSAL")
class ByLibrary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 32, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2)

    def forward(self, ids: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1])
        return self.layers(self.embed(ids), mask=mask, is_causal=True)


@expect("CAUSAL")
class PositionsFirst(nn.Module):
    """Time is dim 0 inside."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.attend = nn.MultiheadAttention(WIDTH, 2)

    def forward(self, ids: Tensor) -> Tensor:
        h = self.embed(ids).transpose(0, 1)
        made = self.attend(h, h, h, attn_mask=~lower(h.shape[0]), need_weights=False)[0]
        return made.transpose(0, 1)


@expect("CAUSAL")
class InPlaceMask(Attends):
    def masked(self, s: Tensor) -> Tensor:
        for t in range(s.shape[-1]):
            s[:, t, t + 1 :] = INF
        return s


@expect("LEAK", "future")
class NoMask(Attends):
    def masked(self, s: Tensor) -> Tensor:
        return s


@expect("LEAK", "future")
class OffByOne(Attends):
    def masked(self, s: Tensor) -> Tensor:
        return s.masked_fill(~lower(s.shape[-1], 1), INF)


@expect("LEAK", "future")
class MaskAfterSoftmax(Attends):
    def mix(self, h: Tensor) -> Tensor:
        s, v = self.scores(h)
        return (s.softmax(-1) * lower(s.shape[-1])) @ v


@expect("LEAK", "future")
class TransposedMask(Attends):
    def masked(self, s: Tensor) -> Tensor:
        return s.masked_fill(~lower(s.shape[-1]).T, INF)


@expect("LEAK", "future")
class WindowBothWays(Attends):
    def masked(self, s: Tensor) -> Tensor:
        t = torch.arange(s.shape[-1])
        return s.masked_fill((t[:, None] - t[None]).abs() > 2, INF)


@expect("LEAK", "future")
class PrefixIsBidirectional(Attends):
    def masked(self, s: Tensor) -> Tensor:
        mask = lower(s.shape[-1])
        mask[:, :4] = True
        return s.masked_fill(~mask, INF)


@expect("LEAK", "future")
class OneHeadForgotten(Attends):
    def mix(self, h: Tensor) -> Tensor:
        q, k, v = self.qkv(h).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        mask = lower(h.shape[1]).expand(4, -1, -1).clone()
        mask[3, :, :] = True
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2)


@expect("LEAK", "future")
class ZeroInitialisedBranch(Attends):
    """A leak behind a projection that begins at zero."""

    def make(self) -> None:
        super().make()
        self.out = nn.Linear(WIDTH, WIDTH)
        nn.init.zeros_(self.out.weight)
        nn.init.zeros_(self.out.bias)

    def mix(self, h: Tensor) -> Tensor:
        s, v = self.scores(h)
        return self.out(s.softmax(-1) @ v)


@expect("LEAK", "future")
class ZeroGate(Tokens):
    def make(self) -> None:
        self.gate = nn.Parameter(torch.zeros(()))

    def mix(self, h: Tensor) -> Tensor:
        return self.gate * h.mean(1, keepdim=True)


def left_padded() -> dict[str, Tensor]:
    mask = torch.ones(2, LENGTH, dtype=torch.int64)
    mask[0, :5] = 0
    return {"ids": ids(), "attention_mask": mask}


@expect("LEAK", "future", batch=left_padded)
class LowestNumberWithLeftPadding(Attends):
    """Rows of nothing but the lowest finite number are rows of equal weights."""

    def forward(self, ids: Tensor, attention_mask: Tensor) -> Tensor:
        h = self.embed(ids)
        s, v = self.scores(h)
        low = torch.finfo(s.dtype).min
        keep = lower(s.shape[-1]) & (attention_mask[:, None] != 0)
        return self.head(h + s.masked_fill(~keep, low).softmax(-1) @ v)


@expect("LEAK", "future")
class LowestNumberWithPaddingSeenInIds(Attends):
    def forward(self, ids: Tensor) -> Tensor:
        h = self.embed(ids)
        s, v = self.scores(h)
        keep = lower(s.shape[-1]) & (ids != 0)[:, None]
        return self.head(h + s.masked_fill(~keep, torch.finfo(s.dtype).min).softmax(-1) @ v)


@expect("CAUSAL")
class InfinityWithPaddingSeenInIds(Attends):
    def forward(self, ids: Tensor) -> Tensor:
        h = self.embed(ids)
        s, v = self.scores(h)
        keep = lower(s.shape[-1]) & (ids != 0)[:, None]
        return self.head(h + s.masked_fill(~keep, INF).softmax(-1).nan_to_num(0.0) @ v)


@expect("CAUSAL UNDER ASSUMPTION")
class MinusTenThousand(Attends):
    def masked(self, s: Tensor) -> Tensor:
        return s + (1.0 - lower(s.shape[-1]).float()) * -1e4


@expect("CAUSAL")
class LinearAttention(Attends):
    def mix(self, h: Tensor) -> Tensor:
        q, k, v = self.qkv(h).chunk(3, -1)
        q, k = F.elu(q) + 1, F.elu(k) + 1
        state = (k.unsqueeze(-1) * v.unsqueeze(-2)).cumsum(1)
        return (q.unsqueeze(-2) @ state).squeeze(-2) / (q * k.cumsum(1)).sum(-1, keepdim=True)


@expect("LEAK", "future")
class LinearAttentionOverAll(Attends):
    def mix(self, h: Tensor) -> Tensor:
        q, k, v = self.qkv(h).chunk(3, -1)
        q, k = F.elu(q) + 1, F.elu(k) + 1
        return q @ (k.transpose(1, 2) @ v) / (q @ k.sum(1).unsqueeze(-1))


@expect("LEAK", "future")
class LinearAttentionWithLaterNorm(Attends):
    """The numerator is causal, the sum that divides it is not."""

    def mix(self, h: Tensor) -> Tensor:
        q, k, v = self.qkv(h).chunk(3, -1)
        q, k = F.elu(q) + 1, F.elu(k) + 1
        weights = (q @ k.transpose(1, 2)) * lower(h.shape[1])
        return weights @ v / (q @ k.sum(1).unsqueeze(-1))


@expect("LEAK", "batch")
class AcrossTheBatch(Attends):
    """Batch and time confused: attention along dim 0."""

    def mix(self, h: Tensor) -> Tensor:
        return super().mix(h.transpose(0, 1)).transpose(0, 1)

    def masked(self, s: Tensor) -> Tensor:
        return s
