"""Finds out in which dtype the ops of a device add: each is made to add up half precision numbers.

Each probe gives an op ``[n, width]`` addends and gets ``[width]`` sums; how their error grows with ``n`` tells a sum
whose partial sums are rounded from one that is rounded once. ``benchmarks/accumulators.py`` writes the table that
:mod:`meshwright.compiler.numerics.accumulators` reads.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

import meshwright.compiler.graph.ops  # noqa: F401  (registers the ops that are probed)
from meshwright.compiler.graph.dtypes import short_name
from meshwright.compiler.numerics.accumulators import Accumulator
from meshwright.compiler.numerics.error_model import ROUNDING, UNIT

WIDTH = 64
COUNTS = (16, 256, 4096)
HALF_FROM = 3.0
"""Roundings from which the error at the largest count is that of an accumulator in half precision: one that rounds each
of its 4096 partial sums has 45, one of 32 bits 1."""

Probe = Callable[[Tensor], Tensor]
_aten = torch.ops.aten


def _zeros(x: Tensor) -> Tensor:
    return torch.zeros((), dtype=torch.int64, device=x.device).expand(x.shape[0])


def _ones(x: Tensor, *shape: int) -> Tensor:
    return torch.ones(shape, dtype=x.dtype, device=x.device)


def _layer_norm_input(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """An input that is normalised to itself, so that the gradient of the weight is the sum of the addends."""
    statistics = torch.float32 if x.device.type != "cpu" else x.dtype
    mean = torch.zeros((x.shape[0], 1), dtype=statistics, device=x.device)
    return torch.ones_like(x), mean, torch.ones_like(mean)


def _layer_norm(x: Tensor, which: int) -> Tensor:
    values, mean, rstd = _layer_norm_input(x)
    weight = _ones(x, x.shape[1])
    given = (x, values, [x.shape[1]], mean, rstd, weight, torch.zeros_like(weight), [True, True, True])
    made: Tensor = _aten.native_layer_norm_backward.default(*given)[which]
    return made


def _rms_norm(x: Tensor) -> Tensor:
    root = torch.ones((x.shape[0], 1), dtype=torch.float32, device=x.device)
    weight = _ones(x, x.shape[1])
    made: Tensor = torch.ops.meshwright.rms_norm_backward(x, torch.ones_like(x), [x.shape[1]], root, weight)[1]
    return made


def _convolution(x: Tensor) -> Tensor:
    n, width = x.shape
    grad = x.t().reshape(1, width, n)
    given = (grad, _ones(x, 1, 1, n), _ones(x, width, 1, 1), [width], [1], [0], [1], False, [0], 1)
    made: Tensor = _aten.convolution_backward.default(*given, [False, True, False])[1]
    return made.reshape(width)


PROBES: dict[str, Probe] = {
    "aten.sum.dim_IntList": lambda x: _aten.sum.dim_IntList(x, [0]),
    "aten.mean.dim": lambda x: _aten.mean.dim(x, [0]) * x.shape[0],
    "aten.cumsum.default": lambda x: _aten.cumsum.default(x, 0)[-1],
    "aten.mm.default": lambda x: _aten.mm.default(_ones(x, 1, x.shape[0]), x)[0],
    "aten.bmm.default": lambda x: _aten.bmm.default(_ones(x, 1, 1, x.shape[0]), x.unsqueeze(0))[0, 0],
    "aten.addmm.default": lambda x: _aten.addmm.default(_ones(x, x.shape[1]) * 0, _ones(x, 1, x.shape[0]), x)[0],
    "aten.mv.default": lambda x: _aten.mv.default(x.t(), _ones(x, x.shape[0])),
    "meshwright.einsum.default": lambda x: torch.ops.meshwright.einsum("n,nw->w", _ones(x, x.shape[0]), x),
    "aten.convolution_backward.default": _convolution,
    "aten.index_add.default": lambda x: _aten.index_add.default(torch.zeros_like(x[:1]), 0, _zeros(x), x)[0],
    "aten.index_add.default of vectors": lambda x: torch.cat(
        [_aten.index_add.default(torch.zeros_like(c[:1]), 0, _zeros(c), c) for c in x.t()]
    ),
    "aten.index_put.default": lambda x: _aten.index_put.default(torch.zeros_like(x[:1]), [_zeros(x)], x, True)[0],
    "aten.scatter_add.default": lambda x: _aten.scatter_add.default(
        torch.zeros_like(x[:1]), 0, _zeros(x)[:, None].expand_as(x), x
    )[0],
    "aten.scatter_add.default of vectors": lambda x: torch.cat(
        [_aten.scatter_add.default(torch.zeros_like(c[:1]), 0, _zeros(c), c) for c in x.t()]
    ),
    "aten.embedding_dense_backward.default": lambda x: _aten.embedding_dense_backward.default(
        x, _zeros(x).contiguous(), 2, -1, False
    )[0],
    "meshwright.embedding_backward.default": lambda x: torch.ops.meshwright.embedding_backward(
        x, _zeros(x).contiguous(), 2, 0, -1
    )[0],
    "aten.native_layer_norm_backward.default": lambda x: _layer_norm(x, 2),
    "meshwright.rms_norm_backward.default": _rms_norm,
}
"""By op: how it adds up the rows of a matrix. Where a kernel has another way for operands of another shape, there is an
entry for that too; the worse of the two counts."""


@dataclass(frozen=True)
class Measured:
    """Errors of the sums of ``COUNTS`` addends of random signs, in roundings of the dtype."""

    errors: tuple[float, ...]

    @property
    def half(self) -> bool:
        """Whether partial sums are rounded to half precision."""
        return not self.errors[-1] < HALF_FROM


def probe(op: str, dtype: torch.dtype, device: torch.device | str = "cpu") -> Measured:
    """What an op makes of sums; ``PROBES`` has the ops. Raises RuntimeError where it does not run on the device."""
    generator = torch.Generator().manual_seed(0)
    unit = ROUNDING * UNIT[short_name(dtype)]
    errors = []
    for count in COUNTS:
        # so large that no sum is below the normal numbers of fp16, and so small that none is above them
        addends = (torch.randn(count, WIDTH, generator=generator) / 8).to(dtype)
        exact = addends.double().sum(0)
        found = PROBES[op](addends.to(device)).double().cpu()
        error = (found - exact).square().mean() / exact.square().mean()
        errors.append(math.sqrt(float(error)) / unit)
    return Measured(tuple(errors))


def table(device: torch.device | str = "cpu") -> dict[str, dict[str, Accumulator]]:
    """By dtype and op, what was found on a device; ops that it does not have are left out."""
    found: dict[str, dict[str, Accumulator]] = {}
    for dtype in (torch.bfloat16, torch.float16):
        mine = found.setdefault(short_name(dtype), {})
        for op in PROBES:
            try:
                measured = probe(op, dtype, device)
            except RuntimeError:
                continue
            name = op.partition(" ")[0]
            if name not in mine or measured.errors[-1] > mine[name].errors[-1]:
                mine[name] = Accumulator("half" if measured.half else "fp32", measured.errors)
    return found
