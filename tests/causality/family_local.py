"""Convolutions, norms, shifts, sums."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

from tests.causality.case import WIDTH, Tokens, expect, floats, lower


class Convolves(Tokens):
    kernel, padding = 3, 2

    def make(self) -> None:
        self.conv = nn.Conv1d(WIDTH, WIDTH, self.kernel, padding=self.padding)

    def cut(self, h: Tensor, length: int) -> Tensor:
        return h[..., :length]

    def mix(self, h: Tensor) -> Tensor:
        return self.cut(self.conv(h.transpose(1, 2)), h.shape[1]).transpose(1, 2)


@expect("CAUSAL")
class CausalConvolution(Convolves):
    pass


@expect("CAUSAL")
class PaddedLeft(Convolves):
    padding = 0

    def mix(self, h: Tensor) -> Tensor:
        return self.conv(F.pad(h.transpose(1, 2), (2, 0))).transpose(1, 2)


@expect("CAUSAL")
class DilatedStack(Tokens):
    def make(self) -> None:
        self.convs = nn.ModuleList(nn.Conv1d(WIDTH, WIDTH, 2, dilation=2**i, groups=2) for i in range(3))

    def mix(self, h: Tensor) -> Tensor:
        h = h.transpose(1, 2)
        for i, conv in enumerate(self.convs):
            h = h + conv(F.pad(h, (2**i, 0))).tanh()
        return h.transpose(1, 2)


@expect("LEAK", "future")
class SameConvolution(Convolves):
    padding = 1


@expect("LEAK", "future")
class CutAtTheWrongEnd(Convolves):
    def cut(self, h: Tensor, length: int) -> Tensor:
        return h[..., -length:]


@expect("CAUSAL")
class MaskedKernel(Convolves):
    """A kernel of 5 in the middle of which the later half is put to zero."""

    def mix(self, h: Tensor) -> Tensor:
        weight = self.conv.weight
        wide = F.pad(weight, (0, 2)) * torch.tensor([1.0, 1.0, 1.0, 0.0, 0.0])
        return F.conv1d(h.transpose(1, 2), wide, self.conv.bias, padding=2).transpose(1, 2)


@expect("CAUSAL")
class WeightNormed(Convolves):
    def make(self) -> None:
        self.conv = weight_norm(nn.Conv1d(WIDTH, WIDTH, 3, padding=2))


@expect("CAUSAL")
class StridedAndRepeated(Tokens):
    """Pools of four, each given to the next four positions."""

    def mix(self, h: Tensor) -> Tensor:
        n = h.shape[1]
        pooled = F.avg_pool1d(F.pad(h.transpose(1, 2), (0, -n % 4)), 4)
        late = F.pad(pooled, (1, 0))[..., :-1]
        return late.repeat_interleave(4, -1)[..., :n].transpose(1, 2)


@expect("LEAK", "future")
class PooledAndRepeated(Tokens):
    def mix(self, h: Tensor) -> Tensor:
        n = h.shape[1]
        pooled = F.max_pool1d(F.pad(h.transpose(1, 2), (0, -n % 4)), 4)
        return pooled.repeat_interleave(4, -1)[..., :n].transpose(1, 2)


@expect("LEAK", "future", "batch", train=True)
class BatchNormInTraining(Tokens):
    def make(self) -> None:
        self.norm = nn.BatchNorm1d(WIDTH)

    def mix(self, h: Tensor) -> Tensor:
        return self.norm(h.transpose(1, 2)).transpose(1, 2)


@expect("CAUSAL")
class BatchNormInEvaluation(BatchNormInTraining):
    pass


@expect("LEAK", "batch")
class NormPerPositionOverBatch(Tokens):
    def mix(self, h: Tensor) -> Tensor:
        return (h - h.mean(0)) / (h.var(0, unbiased=False) + 1e-5).sqrt()


@expect("LEAK", "future")
class LayerNormOverTime(Tokens):
    def mix(self, h: Tensor) -> Tensor:
        return F.layer_norm(h.transpose(1, 2), (h.shape[1],)).transpose(1, 2)


@expect("LEAK", "future")
class GroupNormOverTime(Tokens):
    def make(self) -> None:
        self.norm = nn.GroupNorm(4, WIDTH)

    def mix(self, h: Tensor) -> Tensor:
        return self.norm(h.transpose(1, 2)).transpose(1, 2)


@expect("LEAK", "future")
class InstanceNorm(Tokens):
    def mix(self, h: Tensor) -> Tensor:
        return F.instance_norm(h.transpose(1, 2)).transpose(1, 2)


@expect("CAUSAL")
class NormsOfFeatures(Tokens):
    def make(self) -> None:
        self.a, self.b = nn.LayerNorm(WIDTH), nn.RMSNorm(WIDTH)

    def mix(self, h: Tensor) -> Tensor:
        flat = h.reshape(-1, WIDTH)
        return (self.a(h) * self.b(h) + F.group_norm(flat, 4).reshape(h.shape)) / h.norm(dim=-1, keepdim=True)


@expect("LEAK", "future")
class RollBack(Tokens):
    def mix(self, h: Tensor) -> Tensor:
        return h.roll(-1, 1)


@expect("LEAK", "future")
class RollThatWraps(Tokens):
    def mix(self, h: Tensor) -> Tensor:
        return h.roll(1, 1)


@expect("CAUSAL")
class RollWithFirstPutToZero(Tokens):
    def mix(self, h: Tensor) -> Tensor:
        moved = h.roll(1, 1)
        moved[:, 0] = 0
        return moved


@expect("CAUSAL")
class RollThereAndBack(Tokens):
    def mix(self, h: Tensor) -> Tensor:
        return h.roll(-3, 1).tanh().roll(3, 1)


@expect("CAUSAL")
class FlippedTwice(Tokens):
    def mix(self, h: Tensor) -> Tensor:
        return h.flip(1).tanh().flip(1)


@expect("LEAK", "future")
class SumOfFlipped(Tokens):
    def mix(self, h: Tensor) -> Tensor:
        return h.flip(1).cumsum(1).flip(1)


@expect("CAUSAL UP TO ROUNDING")
class TotalMinusSuffix(Tokens):
    def mix(self, h: Tensor) -> Tensor:
        after = h.flip(1).cumsum(1).flip(1)
        return h.sum(1, keepdim=True) - after + h


@expect("CAUSAL UP TO ROUNDING")
class LongConvolutionByFourier(Tokens):
    def make(self) -> None:
        self.kernel = nn.Parameter(torch.randn(64, WIDTH))

    def mix(self, h: Tensor) -> Tensor:
        n = h.shape[1]
        made = torch.fft.rfft(h, 2 * n, dim=1) * torch.fft.rfft(self.kernel[:n], 2 * n, dim=0)
        return torch.fft.irfft(made, 2 * n, dim=1)[:, :n]


@expect("LEAK", "future")
class CircularConvolutionByFourier(LongConvolutionByFourier):
    def mix(self, h: Tensor) -> Tensor:
        n = h.shape[1]
        return torch.fft.irfft(torch.fft.rfft(h, dim=1) * torch.fft.rfft(self.kernel[:n], dim=0), n, dim=1)


@expect("LEAK", "future")
class FourierMixing(Tokens):
    def mix(self, h: Tensor) -> Tensor:
        return torch.fft.fft2(h).real


@expect("CAUSAL")
class CumulativeMean(Tokens):
    def mix(self, h: Tensor) -> Tensor:
        return h.cumsum(1) / torch.arange(1, h.shape[1] + 1)[:, None]


@expect("CAUSAL")
class CumulativeMaximum(Tokens):
    def mix(self, h: Tensor) -> Tensor:
        return h.cummax(1).values + h.logcumsumexp(1)


@expect("LEAK", "future")
class MaximumOverTime(Tokens):
    def mix(self, h: Tensor) -> Tensor:
        return h.amax(1, keepdim=True)


@expect("LEAK", "future")
class NormaliseByTheLargest(Tokens):
    def mix(self, h: Tensor) -> Tensor:
        return h / h.abs().amax((1, 2), keepdim=True)


@expect("CAUSAL")
class MixedByTriangularMatrix(Tokens):
    """A learnt matrix over positions, cut to its lower half."""

    def make(self) -> None:
        self.weight = nn.Parameter(torch.randn(64, 64))

    def mix(self, h: Tensor) -> Tensor:
        n = h.shape[1]
        return self.weight[:n, :n].tril() @ h


@expect("LEAK", "future")
class MixedByAnyMatrix(MixedByTriangularMatrix):
    def mix(self, h: Tensor) -> Tensor:
        n = h.shape[1]
        return self.weight[:n, :n] @ h


@expect("CAUSAL")
class TriangularSolve(Tokens):
    def mix(self, h: Tensor) -> Tensor:
        n = h.shape[1]
        a = (h @ h.transpose(1, 2)).tril(-1) * 0.1 + torch.eye(n)
        return torch.linalg.solve_triangular(a, h, upper=False)


@expect("CAUSAL")
class ChunkMeanOfPreviousChunks(Tokens):
    def mix(self, h: Tensor) -> Tensor:
        n = h.shape[1] // 4 * 4
        means = h[:, :n].unflatten(1, (-1, 4)).mean(2)
        late = F.pad(means, (0, 0, 1, 0))
        return late.repeat_interleave(4, 1)[:, : h.shape[1]]


@expect("LEAK", "future")
class ChunkMeanOfOwnChunk(Tokens):
    def mix(self, h: Tensor) -> Tensor:
        n = -(-h.shape[1] // 4) * 4
        padded = F.pad(h, (0, 0, 0, n - h.shape[1]))
        return padded.unflatten(1, (-1, 4)).mean(2).repeat_interleave(4, 1)[:, : h.shape[1]]


@expect("CAUSAL", batch=floats)
class OnActivations(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).cumsum(1)


@expect("LEAK", "future", batch=floats)
def activations_by_a_function(x: Tensor) -> Tensor:
    return x - x.mean(1, keepdim=True)


@expect("CAUSAL", batch=floats)
def activations_by_a_causal_function(x: Tensor) -> Tensor:
    return (x @ x.transpose(1, 2)).masked_fill(~lower(x.shape[1]), 0.0) @ x
