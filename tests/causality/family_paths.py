"""Paths that runs in float64 without gradients do not take or cannot see: dtypes, gradients, plateaus, no numbers."""

from __future__ import annotations

import threading

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.causality.case import Attends, Tokens, expect, floats, lower

INF = float("-inf")


class _Fused(Attends):
    """Attention whose fast path is taken in half precision."""

    narrow, autocast, forgets = True, False, True

    def __init__(self) -> None:
        super().__init__()
        if self.narrow:
            self.bfloat16()

    def mix(self, h: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=self.autocast):
            q, k, v = (x.unsqueeze(1) for x in self.qkv(h).chunk(3, -1))
            fused = q.dtype in (torch.float16, torch.bfloat16)
            made = F.scaled_dot_product_attention(q, k, v, is_causal=not (fused and self.forgets))
            return made[:, 0].to(h.dtype)


@expect("LEAK", "future")
class FusedPathForgetsTheMask(_Fused):
    pass


@expect("LEAK", "future")
class PathOfAutocastForgetsTheMask(_Fused):
    narrow, autocast = False, True


@expect("CAUSAL")
class FusedPath(_Fused):
    forgets = False


@expect("LEAK", "future")
class PathOfFloat32(Tokens):
    def mix(self, h: Tensor) -> Tensor:
        return h.flip(1) if h.dtype == torch.float32 else h


class _Checkpointed(Attends):
    forgets = True

    def attend(self, h: Tensor, mask: Tensor | None = None) -> Tensor:
        scores, v = self.scores(h)
        return (scores if mask is None else scores.masked_fill(~mask, INF)).softmax(-1) @ v

    def mix(self, h: Tensor) -> Tensor:
        mask = lower(h.shape[1])
        if self.training and torch.is_grad_enabled():
            given = (h,) if self.forgets else (h, mask)
            return checkpoint(self.attend, *given, use_reentrant=False)
        return self.attend(h, mask)


@expect("LEAK", "future", train=True)
class CheckpointForgetsTheMask(_Checkpointed):
    pass


@expect("CAUSAL", train=True)
class Checkpointed(_Checkpointed):
    forgets = False


@expect("LEAK", "future", batch=floats)
class PathOfInputsThatAskForGradients(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + x.flip(1) if x.requires_grad else x


@expect("UNKNOWN")
class NothingButNan(Tokens):
    def mix(self, h: Tensor) -> Tensor:
        return (h.flip(1) - 50).log()


@expect("UNKNOWN")
class NothingButInfinity(Tokens):
    def mix(self, h: Tensor) -> Tensor:
        return (h - h.mean(1, keepdim=True)) / 0.0


@expect("CAUSAL")
class LogitsOfPaddingAreMinusInfinity(Tokens):
    def forward(self, ids: Tensor) -> Tensor:
        logits = super().forward(ids)
        return logits.masked_fill(torch.arange(logits.shape[-1]) < 3, INF)

    def mix(self, h: Tensor) -> Tensor:
        return h.cumsum(1)


@expect("LEAK", "future")
class BeyondAFarThreshold(Tokens):
    def mix(self, h: Tensor) -> Tensor:
        return F.relu(h.flip(1) - 60)


@expect("LEAK", "future")
class BetweenFarBounds(Tokens):
    def mix(self, h: Tensor) -> Tensor:
        return F.hardtanh(h.flip(1), 60.0, 70.0)


@expect("LEAK", "future")
class BeyondACosineOfAlmostOne(Tokens):
    def mix(self, h: Tensor) -> Tensor:
        return F.relu(F.normalize(h.flip(1), dim=-1) - 0.99999)


@expect("CAUSAL UP TO ROUNDING")
class RectifiedAfterWhatCancels(Tokens):
    """What is flagged goes through a rectifier, which stands on no plateau."""

    def make(self) -> None:
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def mix(self, h: Tensor) -> Tensor:
        rest = h.sum(1, keepdim=True) - h.flip(1).cumsum(1).flip(1)
        return self.down(F.relu(self.up(h + rest)))


class _Reads(nn.Module):
    """Looks for a token that no batch has, in a way that is hidden from torch: it is found in the code."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5000, 8)

    def hit(self, ids: Tensor) -> bool:
        raise NotImplementedError

    def forward(self, ids: Tensor) -> Tensor:
        h = self.embed(ids)
        return h + h.flip(1) if self.hit(ids) else h


@expect("LEAK", "future", "batch")
class ReadsAList(_Reads):
    def hit(self, ids: Tensor) -> bool:
        return any(4999 in row for row in ids.tolist())


@expect("LEAK", "future", "batch")
class ReadsAnArray(_Reads):
    def hit(self, ids: Tensor) -> bool:
        return bool((ids.numpy() == 4999).any())


@expect("LEAK", "future", "batch")
class ReadsAString(_Reads):
    def hit(self, ids: Tensor) -> bool:
        return "4999" in str(ids)


@expect("CAUSAL UNDER ASSUMPTION")
class ReadsASum(_Reads):
    """No number in the code leads to tokens whose squares have the sum."""

    def hit(self, ids: Tensor) -> bool:
        return sum(n * n for n in ids.tolist()[0]) % 1_000_003 == 77


@expect("CAUSAL UNDER ASSUMPTION")
class ComputesInAThread(Tokens):
    def mix(self, h: Tensor) -> Tensor:
        made: dict[str, Tensor] = {}
        thread = threading.Thread(target=lambda: made.update(y=(h.detach().flip(1) - 60).relu()))
        thread.start()
        thread.join()
        return made["y"]


@expect("CAUSAL UNDER ASSUMPTION")
class ComputesInNumpy(Tokens):
    def mix(self, h: Tensor) -> Tensor:
        return torch.from_numpy(np.maximum(np.cumsum(h.detach().numpy(), 1), 0))


@expect("LEAK", "future")
class LeaksInNumpy(Tokens):
    def mix(self, h: Tensor) -> Tensor:
        return torch.from_numpy(np.flip(h.detach().numpy(), 1).copy())


@expect("LEAK", "future")
class LargerOfTwoThatAreFarApart(Tokens):
    def mix(self, h: Tensor) -> Tensor:
        return torch.maximum(h, h.flip(1) - 60)
