"""Means and variances as sums times a constant, so that no average is hidden in an op."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from meshwright.frontend.capture.lowering.site import Site, lowers

aten = torch.ops.aten
HALF = (torch.float16, torch.bfloat16)


def mean_of(x: Tensor, dims: list[int] | None = None, keepdim: bool = False) -> Tensor:
    """The mean over dims (all of them if None); half precision is summed in fp32 and rounded once."""
    over = list(range(x.dim())) if dims is None or not dims else [d % max(x.dim(), 1) for d in dims]
    count = math.prod(x.shape[d] for d in over) if x.dim() else 1
    wide = x.float() if x.dtype in HALF else x
    total = wide.sum(over, keepdim) if x.dim() else wide
    return (total * (1.0 / count)).to(x.dtype)


@lowers(aten.mean.default)
def mean(site: Site, x: Tensor, *, dtype: torch.dtype | None = None) -> Tensor:
    return mean_of(x if dtype is None else x.to(dtype))


@lowers(aten.mean.dim)
def mean_dim(
    site: Site, x: Tensor, dim: list[int] | None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Tensor:
    return mean_of(x if dtype is None else x.to(dtype), dim, keepdim)


@lowers(aten.adaptive_avg_pool1d.default, aten.adaptive_avg_pool2d.default)
def adaptive_average(site: Site, x: Tensor, output_size: list[int]) -> Tensor:
    """Over a whole image it is a mean; the kernel's way to it writes strides by hand."""
    if all(n == 1 for n in output_size):
        return mean_of(x, list(range(-len(output_size), 0)), keepdim=True)
    pool = aten.adaptive_avg_pool1d if len(output_size) == 1 else aten.adaptive_avg_pool2d
    made: Tensor = pool(x, output_size)
    return made


def variance(x: Tensor, dims: Any, correction: float, keepdim: bool) -> tuple[Tensor, Tensor]:
    """Variance and mean over dims."""
    over = list(range(x.dim())) if not dims else [d % x.dim() for d in ([dims] if isinstance(dims, int) else dims)]
    count = math.prod(x.shape[d] for d in over)
    wide = x.float() if x.dtype in HALF else x
    middle = mean_of(wide, over, True)
    away = wide - middle
    found = (away * away).sum(over, keepdim) * (1.0 / max(count - correction, 0) if count > correction else math.inf)
    return found.to(x.dtype), (middle if keepdim else middle.squeeze(over)).to(x.dtype)


@lowers(aten.var.correction)
def var(site: Site, x: Tensor, dim: Any = None, *, correction: float | None = None, keepdim: bool = False) -> Tensor:
    return variance(x, dim, 1 if correction is None else correction, keepdim)[0]


@lowers(aten.std.correction)
def std(site: Site, x: Tensor, dim: Any = None, *, correction: float | None = None, keepdim: bool = False) -> Tensor:
    return variance(x, dim, 1 if correction is None else correction, keepdim)[0].sqrt()


@lowers(aten.var.dim)
def var_dim(site: Site, x: Tensor, dim: Any, unbiased: bool = True, keepdim: bool = False) -> Tensor:
    return variance(x, dim, int(unbiased), keepdim)[0]


@lowers(aten.std.dim)
def std_dim(site: Site, x: Tensor, dim: Any, unbiased: bool = True, keepdim: bool = False) -> Tensor:
    return variance(x, dim, int(unbiased), keepdim)[0].sqrt()


@lowers(aten.var.default)
def var_all(site: Site, x: Tensor, unbiased: bool = True) -> Tensor:
    return variance(x, None, int(unbiased), False)[0]


@lowers(aten.std.default)
def std_all(site: Site, x: Tensor, unbiased: bool = True) -> Tensor:
    return variance(x, None, int(unbiased), False)[0].sqrt()


@lowers(aten.var_mean.correction)
def var_mean(
    site: Site, x: Tensor, dim: Any = None, *, correction: float | None = None, keepdim: bool = False
) -> tuple[Tensor, Tensor]:
    return variance(x, dim, 1 if correction is None else correction, keepdim)
