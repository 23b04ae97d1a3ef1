"""Recurrences: cells, scans, state spaces, caches."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from tests.causality.case import WIDTH, Tokens, expect


@expect("CAUSAL")
class Gru(Tokens):
    def make(self) -> None:
        self.cell = nn.GRU(WIDTH, WIDTH, 2, batch_first=True)

    def mix(self, h: Tensor) -> Tensor:
        return self.cell(h)[0]


@expect("CAUSAL")
class Lstm(Gru):
    def make(self) -> None:
        self.cell = nn.LSTM(WIDTH, WIDTH, batch_first=True)


@expect("LEAK", "future")
class BothWays(Gru):
    def make(self) -> None:
        self.cell = nn.GRU(WIDTH, WIDTH // 2, batch_first=True, bidirectional=True)


@expect("CAUSAL")
class PackedSequences(Gru):
    def mix(self, h: Tensor) -> Tensor:
        lengths = torch.full((h.shape[0],), h.shape[1])
        packed = pack_padded_sequence(h, lengths, batch_first=True, enforce_sorted=False)
        return pad_packed_sequence(self.cell(packed)[0], batch_first=True)[0]


@expect("CAUSAL")
class TokenShift(Tokens):
    def make(self) -> None:
        self.share = nn.Parameter(torch.rand(WIDTH))

    def mix(self, h: Tensor) -> Tensor:
        before = F.pad(h, (0, 0, 1, -1))
        return h * self.share + before * (1 - self.share)


@expect("LEAK", "future")
class TokenShiftTheWrongWay(TokenShift):
    def mix(self, h: Tensor) -> Tensor:
        return h * self.share + F.pad(h, (0, 0, -1, 1)) * (1 - self.share)


@expect("CAUSAL")
class MovingAverage(Tokens):
    def mix(self, h: Tensor) -> Tensor:
        state, made = torch.zeros_like(h[:, 0]), []
        for t in range(h.shape[1]):
            state = 0.9 * state + 0.1 * h[:, t]
            made.append(state)
        return torch.stack(made, 1)


@expect("CAUSAL")
class MovingAverageAsMatrix(Tokens):
    def make(self) -> None:
        self.decay = nn.Parameter(torch.tensor(0.3))

    def mix(self, h: Tensor) -> Tensor:
        t = torch.arange(h.shape[1])
        late = t[:, None] - t[None]
        weights = torch.where(late >= 0, self.decay.sigmoid() ** late.clamp(min=0), 0.0)
        return weights @ h


@expect("CAUSAL")
class SelectiveScan(Tokens):
    """A state space whose decay depends on the token."""

    def make(self) -> None:
        self.dt, self.bc = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 8)
        self.a = nn.Parameter(-torch.rand(WIDTH, 4))

    def mix(self, h: Tensor) -> Tensor:
        dt = F.softplus(self.dt(h))
        b, c = self.bc(h).chunk(2, -1)
        decay = (dt[..., None] * self.a).exp()
        state, made = torch.zeros_like(decay[:, 0]), torch.zeros_like(h)
        for t in range(h.shape[1]):
            state = decay[:, t] * state + dt[:, t, :, None] * b[:, t, None] * h[:, t, :, None]
            made[:, t] = (state * c[:, t, None]).sum(-1)
        return made


@expect("CAUSAL")
class ScanInChunks(Tokens):
    """Within a chunk by a triangular matrix of decays, between chunks by their states."""

    def make(self) -> None:
        self.rate = nn.Linear(WIDTH, 1)

    def mix(self, h: Tensor) -> Tensor:
        n, size = h.shape[1], 4
        x = F.pad(h, (0, 0, 0, -n % size)).unflatten(1, (-1, size))
        log = F.logsigmoid(self.rate(x)[..., 0]).cumsum(-1)
        decay = (log[..., :, None] - log[..., None, :]).masked_fill(
            torch.ones(size, size, dtype=torch.bool).triu(1), float("-inf")
        )
        within = decay.exp() @ x
        states, made = torch.zeros_like(x[:, 0, 0]), []
        for chunk in range(x.shape[1]):
            made.append(within[:, chunk] + log[:, chunk, :, None].exp() * states[:, None])
            states = made[-1][:, -1]
        return torch.cat(made, 1)[:, :n]


@expect("LEAK", "future")
class ScanInChunksFromOwnEnd(ScanInChunks):
    """The state handed to a chunk is that of its own end."""

    def mix(self, h: Tensor) -> Tensor:
        n, size = h.shape[1], 4
        x = F.pad(h, (0, 0, 0, -n % size)).unflatten(1, (-1, size))
        ends = x.sum(2).cumsum(1)
        return (x.cumsum(2) + ends[:, :, None]).flatten(1, 2)[:, :n]


@expect("CAUSAL")
class DeltaRule(Tokens):
    def make(self) -> None:
        self.kvb = nn.Linear(WIDTH, 2 * WIDTH + 1)

    def mix(self, h: Tensor) -> Tensor:
        k, v, b = self.kvb(h).split([WIDTH, WIDTH, 1], -1)
        k, b = F.normalize(k, dim=-1), b.sigmoid()
        state, made = h.new_zeros(h.shape[0], WIDTH, WIDTH), []
        for t in range(h.shape[1]):
            old = torch.einsum("bkv,bk->bv", state, k[:, t])
            state = state + torch.einsum("bk,bv->bkv", k[:, t], b[:, t] * (v[:, t] - old))
            made.append(torch.einsum("bkv,bk->bv", state, h[:, t]))
        return torch.stack(made, 1)


@expect("CAUSAL")
class DoublingScan(Tokens):
    """A parallel scan that adds what stands 1, 2, 4, ... before."""

    def mix(self, h: Tensor) -> Tensor:
        step = 1
        while step < h.shape[1]:
            h = h + F.pad(h, (0, 0, step, -step)) * 0.5
            step *= 2
        return h


@expect("CAUSAL")
class WritesIntoACache(Tokens):
    def make(self) -> None:
        self.register_buffer("cache", torch.zeros(4, 64, WIDTH))

    def mix(self, h: Tensor) -> Tensor:
        rows, n = h.shape[:2]
        self.cache[:rows, :n] = h.detach()
        return self.cache[:rows, :n].cumsum(1)


@expect("LEAK", "future")
class ReadsACacheThatIsFull(WritesIntoACache):
    def mix(self, h: Tensor) -> Tensor:
        rows, n = h.shape[:2]
        self.cache[:rows, :n] = h.detach()
        return self.cache[:rows].sum(1, keepdim=True).expand(-1, n, -1)


@expect("LEAK", "batch")
class CacheOfOneRow(WritesIntoACache):
    """All rows write into the same place."""

    def mix(self, h: Tensor) -> Tensor:
        made = []
        for row in range(h.shape[0]):
            self.cache[0, : h.shape[1]] += h[row].detach()
            made.append(self.cache[0, : h.shape[1]].cumsum(0))
        return torch.stack(made)


@expect("LEAK", "batch")
class StateNotResetBetweenRows(Tokens):
    def make(self) -> None:
        self.cell = nn.GRUCell(WIDTH, WIDTH)

    def mix(self, h: Tensor) -> Tensor:
        state, rows = h.new_zeros(1, WIDTH), []
        for row in range(h.shape[0]):
            made = []
            for t in range(h.shape[1]):
                state = self.cell(h[row, t : t + 1], state)
                made.append(state)
            rows.append(torch.cat(made))
        return torch.stack(rows)
