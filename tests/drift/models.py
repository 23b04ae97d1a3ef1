"""Small models that drift, each by one thing, and one that does not."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY, WIDTH, LENGTH = 40, 16, 12


def tokens(rows: int = 2, length: int = LENGTH) -> Tensor:
    return torch.randint(VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(1))


class Base(nn.Module):
    """Embeds, mixes with all tokens before, and tells logits."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def attend(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        scores = (q @ k.transpose(1, 2)) * WIDTH**-0.5
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
        return x + self.out(scores.masked_fill(~mask, float("-inf")).softmax(-1) @ v)

    def middle(self, x: Tensor) -> Tensor:
        return x

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.middle(self.attend(self.embed(ids))))


class Dropping(Base):
    """Dropout, and a loss of balance that only training adds up: neither is drift."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.5)
        self.balance = torch.zeros(())

    def middle(self, x: Tensor) -> Tensor:
        if self.training:
            self.balance = x.square().mean()
        return self.drop(x)


class TrainOnlyUpcast(Base):
    """RMS norm in f32 while training, in bf16 afterwards."""

    def middle(self, x: Tensor) -> Tensor:
        wide = x.float() if self.training else x
        return (wide * (wide.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt()).to(x.dtype)


class EvalOnlyHalf(Base):
    """A product in bf16 in evaluation alone."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def middle(self, x: Tensor) -> Tensor:
        if self.training:
            return self.inner(x)
        return F.linear(x.bfloat16(), self.inner.weight.bfloat16(), self.inner.bias.bfloat16()).float()


class EvalOnlyRounding(Base):
    """Rounded to bf16 and back in evaluation alone."""

    def middle(self, x: Tensor) -> Tensor:
        return x if self.training else x.bfloat16().float()


class EvalAutocast(Base):
    """Evaluation under autocast."""

    def forward(self, ids: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=not self.training):
            return self.head(self.attend(self.embed(ids))).float()


class FusedInEval(Base):
    """The fused attention in evaluation, the written one in training."""

    def attend(self, x: Tensor) -> Tensor:
        if self.training:
            return super().attend(x)
        q, k, v = (t.unsqueeze(1) for t in self.qkv(x).chunk(3, -1))
        return x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).squeeze(1))


class OtherActivation(Base):
    """GELU in training, its approximation by tanh in evaluation."""

    def middle(self, x: Tensor) -> Tensor:
        return F.gelu(x) if self.training else F.relu(x)


class OtherScale(Base):
    """A temperature in evaluation alone."""

    def middle(self, x: Tensor) -> Tensor:
        return x * (1.0 if self.training else 0.9)


class Capacity(Base):
    """Experts take fewer tokens in training than in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(WIDTH, 4), nn.Parameter(torch.randn(4, WIDTH, WIDTH) / 4)

    def middle(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        capacity = int((1.0 if self.training else 2.0) * flat.shape[0] / 4)
        chosen = F.one_hot(self.gate(flat).argmax(-1), 4)
        place = (chosen.cumsum(0) - 1) * chosen
        kept = chosen * (place < capacity)
        return x + torch.einsum("ne,nd,edf->nf", kept.to(x.dtype), flat, self.experts).view_as(x)


class Normed(Base):
    """Batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def middle(self, x: Tensor) -> Tensor:
        return self.norm(x.transpose(1, 2)).transpose(1, 2)


class OtherDims(Base):
    """Centred over the features in training, over half of them in evaluation."""

    def middle(self, x: Tensor) -> Tensor:
        return x - x.mean((-1,) if self.training else (0, -1), keepdim=True)


class DropsInEval(Base):
    """Dropout that is not told that training is over."""

    def middle(self, x: Tensor) -> Tensor:
        return F.dropout(x, 0.1)


class Cached(nn.Module):
    """One layer of attention with rotary positions and a cache ``(keys, values)``."""

    def __init__(self, *, offset: int = 0, window: int = 0, forget_positions: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.offset, self.window, self.forget = offset, window, forget_positions

    def turned(self, x: Tensor, start: int) -> Tensor:
        places = torch.arange(start, start + x.shape[1], dtype=x.dtype)
        angles = places[:, None] * 100.0 ** (-torch.arange(WIDTH // 2, dtype=x.dtype) / 8)
        a, b = x.chunk(2, -1)
        return torch.cat([a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()], -1)

    def forward(self, ids: Tensor, past_key_values: Any = None, use_cache: bool = False) -> Any:
        x = self.embed(ids)
        q, k, v = self.qkv(x).chunk(3, -1)
        seen = 0 if past_key_values is None else past_key_values[2]
        start = seen + (self.offset if seen else 0)
        q, k = self.turned(q, 0 if self.forget else start), self.turned(k, 0 if self.forget else start)
        if past_key_values is not None:
            k, v = torch.cat([past_key_values[0], k], 1), torch.cat([past_key_values[1], v], 1)
        total = k.shape[1]
        mask = torch.ones(total, total, dtype=torch.bool).tril()[-ids.shape[1] :]
        scores = (q @ k.transpose(1, 2)).masked_fill(~mask, float("-inf"))
        logits = self.head(x + scores.softmax(-1) @ v)
        if not use_cache:
            return logits
        if self.window:
            k, v = k[:, -self.window :], v[:, -self.window :]
        return logits, (k, v, seen + ids.shape[1])


class CachedConvolution(nn.Module):
    """A convolution whose state is one token too short."""

    def __init__(self, keep: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.conv, self.keep = nn.Conv1d(WIDTH, WIDTH, 4), keep

    def forward(self, ids: Tensor, cache: Tensor | None = None) -> tuple[Tensor, Tensor]:
        x = self.embed(ids).transpose(1, 2)
        joined = x if cache is None else torch.cat([cache, x], -1)
        joined = F.pad(joined, (3 + x.shape[-1] - joined.shape[-1], 0))
        return self.head(self.conv(joined).transpose(1, 2)), joined[..., -self.keep :]


class ScaledByLength(Base):
    """Queries times the logarithm of the length of the batch."""

    def middle(self, x: Tensor) -> Tensor:
        return x * torch.log(torch.tensor(float(x.shape[1])))


class RotaryByLength(Cached):
    """A rotary table that is stretched over the length at hand."""

    def turned(self, x: Tensor, start: int) -> Tensor:
        places = torch.arange(x.shape[1], dtype=x.dtype) / x.shape[1]
        return x * (1 + places[:, None])


class Bidirectional(Base):
    """An encoder."""

    def attend(self, x: Tensor) -> Tensor:
        return x + (x @ x.transpose(1, 2)).softmax(-1) @ x


class FastPath(nn.Module):
    """Torch's own encoder layer, which takes a fused kernel when nothing is trained."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.layer = nn.TransformerEncoderLayer(WIDTH, 2, 32, batch_first=True)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.layer(self.embed(ids)))


class Failing(Base):
    """Raises in evaluation."""

    def middle(self, x: Tensor) -> Tensor:
        if not self.training:
            raise ValueError("only for training")
        return x


class Keeping(Base):
    """Keeps a table, a count and statistics between runs: nothing that a comparison may leave behind."""

    def __init__(self) -> None:
        super().__init__()
        self.tables: dict[int, Tensor] = {}
        self.calls = 0
        self.register_buffer("mean", torch.zeros(WIDTH))

    def middle(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.tables[x.shape[1]] = x.detach()
        if self.training:
            self.mean.mul_(0.9).add_(0.1 * x.detach().mean((0, 1)))
        return x


class HandNormed(Base):
    """Batch norm in the model's own words."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("variance", torch.ones(WIDTH))

    def middle(self, x: Tensor) -> Tensor:
        mean, variance = self.mean, self.variance
        if self.training:
            mean, variance = x.mean((0, 1)), x.var((0, 1))
            self.mean.mul_(0.9).add_(0.1 * mean.detach())
            self.variance.mul_(0.9).add_(0.1 * variance.detach())
        return (x - mean) / (variance + 1e-5).sqrt()


class RoundedOnce(Base):
    """Cast to f32 for one op, which computes in f32 anyway: the same bits."""

    def middle(self, x: Tensor) -> Tensor:
        return F.silu(x.float()).to(x.dtype) if self.training else F.silu(x)


class CappedInEval(Base):
    """Logits capped in evaluation alone: nothing comes after it."""

    def forward(self, ids: Tensor) -> Tensor:
        logits = super().forward(ids)
        return logits if self.training else 3 * (logits / 3).tanh()


class Recurrent(nn.Module):
    """Two layers of a GRU, with dropout between them, that take a state and return it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.layers = (
            nn.Embedding(VOCABULARY, WIDTH),
            nn.GRU(WIDTH, WIDTH, 2, batch_first=True, dropout=0.3),
        )

    def forward(self, ids: Tensor, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
        out, after = self.layers(self.embed(ids), state)
        return out, after


class OtherWindow(Base):
    """Training sees four tokens, evaluation all before."""

    def attend(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
        if self.training:
            mask = mask.triu(-3)
        return x + self.out((q @ k.transpose(1, 2)).masked_fill(~mask, float("-inf")).softmax(-1) @ v)


class OtherPositions(Base):
    """Positions begin at 1 in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.places = nn.Embedding(LENGTH + 1, WIDTH)

    def middle(self, x: Tensor) -> Tensor:
        return x + self.places(torch.arange(x.shape[1]) + (0 if self.training else 1))


class Merged(Base):
    """Two products in training, one of merged weights in evaluation."""

    def middle(self, x: Tensor) -> Tensor:
        weight = self.out.weight
        if self.training:
            return F.linear(x, weight) + F.linear(F.linear(x, weight), weight)
        return F.linear(x, weight + weight @ weight)


class Clamped(Base):
    """Training keeps values within a bound."""

    def __init__(self, bound: float) -> None:
        super().__init__()
        self.bound = bound

    def middle(self, x: Tensor) -> Tensor:
        return x.clamp(-self.bound, self.bound) if self.training else x


class OtherEpsilon(Base):
    """A layer norm with another epsilon in evaluation."""

    def middle(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, (WIDTH,), eps=1e-5 if self.training else 1e-2)


class NotANumber(Base):
    """Gives NaN, everywhere or where a token is large."""

    def __init__(self, everywhere: bool) -> None:
        super().__init__()
        self.everywhere = everywhere

    def forward(self, ids: Tensor) -> Tensor:
        none = torch.ones_like(ids) > 0 if self.everywhere else ids > 30
        return super().forward(ids).masked_fill(none[..., None], float("nan"))
