"""A step whose gradient is the sum of its samples, so that what a plan makes of that sum can be measured."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor, nn

from meshwright.compiler.graph.pipeline_program import Compiled
from meshwright.compiler.passes.pipeline import compile_plan
from meshwright.compiler.passes.presets import preset
from meshwright.compiler.plan import Numerics, Precision
from meshwright.frontend.capture import capture
from meshwright.frontend.capture.loss_scale import LossScale
from meshwright.runtime.materialize import from_module
from meshwright.runtime.virtual import VirtualCluster

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Sum(nn.Module):
    """``sum(x * w)``: the gradient of ``w`` is the sum of the samples ``x``, each of which one rank may hold."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        return (x.to(self.w.dtype) * self.w).float().sum()


class Average(Sum):
    """A third of that, divided in half precision before the sum over ranks."""

    def forward(self, x: Tensor) -> Tensor:
        return (x.to(self.w.dtype) @ (self.w / 3)).float().sum()


def samples(count: int, width: int, addends: str, dtype: torch.dtype) -> Tensor:
    """Numbers of the dtype, kept in fp32: of random signs, or of one sign and about one size."""
    torch.manual_seed(0)
    if addends == "random signs":
        made = torch.randn(count, width)
    else:
        made = (1 + 0.1 * torch.randn(count, width)) * torch.exp2(torch.rand(width))
    return made.to(dtype).float()


def compiled(
    text: str, width: int, count: int, numerics: Numerics, dtype: str = "bf16", reduce: str = "", kind: type[Sum] = Sum
) -> tuple[Sum, Compiled]:
    """Computed and reduced in half precision, if ``reduce`` says nothing else; SGD with a rate of 1 on fp32 weights
    that are 0, so that after a step they are the negative sum, as it was kept."""
    model = kind(width)
    precision = Precision(dtype, "fp32", reduce or dtype)
    batch = {"x": torch.zeros(count, width)}
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    unscaled = LossScale(initial=1.0) if dtype == "fp16" else None
    program = capture(model, batch, optimizer, precision=precision, loss_scale=unscaled)
    return model, compile_plan(program, replace(preset(text, program, None, precision), numerics=numerics))


def relative_error(found: Tensor, x: Tensor) -> float:
    """Root mean square, of the sums of the rows of ``x``."""
    exact = x.double().sum(0)
    return math.sqrt(float((found.double() - exact).square().mean() / exact.square().mean()))


def measured(
    text: str, count: int, numerics: Numerics, addends: str = "random signs", width: int = 4096, dtype: str = "bf16"
) -> float:
    """The relative error of the sum of ``count`` samples by the step of a plan, on the virtual cluster."""
    model, program = compiled(text, width, count, numerics, dtype)
    cluster = VirtualCluster(program, from_module(model))
    x = samples(count, width, addends, DTYPES[dtype])
    cluster.step({"x": x})
    return relative_error(-cluster.full_parameters()["w"], x)
