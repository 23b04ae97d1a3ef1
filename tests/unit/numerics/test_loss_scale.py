"""fp16 with loss scaling: step by step what ``torch.amp.GradScaler`` does in one process, on every kind of plan."""

from __future__ import annotations

import copy
import itertools
import math
from functools import cache

import pytest
import torch
from torch import Tensor, nn

from meshwright.compiler.graph.program import StepProgram
from meshwright.compiler.passes.pipeline import compile_plan
from meshwright.compiler.passes.presets import preset
from meshwright.compiler.plan import Precision
from meshwright.frontend.capture import capture
from meshwright.frontend.capture.loss_scale import LossScale
from meshwright.runtime.materialize import from_module
from meshwright.runtime.virtual import VirtualCluster

WIDTH, SAMPLES, CLIP = 16, 8, 0.5
HALF = torch.float16
HOW = LossScale(initial=2.0**14, interval=3)
FP16 = Precision("fp16", "fp32", "fp32")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(WIDTH, 2 * WIDTH) / 4)
        self.down = nn.Parameter(torch.randn(2 * WIDTH, WIDTH) / 6)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(x @ self.up.to(HALF)) @ self.down.to(HALF)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        h = x.to(HALF)
        for block in self.blocks:
            h = block(h)
        return (h.float() ** 2).mean()


def batches() -> list[Tensor]:
    """Ten; the gradients of the third, fourth and eighth overflow fp16 at the scale that there is then."""
    torch.manual_seed(1)
    made = [torch.randn(SAMPLES, WIDTH) for _ in range(10)]
    for large in (2, 3, 7):
        made[large] = made[large] * 900
    return made


def model() -> Model:
    torch.manual_seed(0)
    return Model()


def optimizer(of: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(of.parameters(), lr=1e-2)


@cache
def program() -> StepProgram:
    made = model()
    batch = {"x": batches()[0]}
    return capture(made, batch, optimizer(made), clip=CLIP, precision=FP16, loss_scale=HOW)


@cache
def by_torch() -> tuple[list[float], list[float], dict[str, Tensor], float]:
    """Scale and norm after every step, the weights at the end, and how many steps the optimizer has made."""
    mine = copy.deepcopy(model())
    steps = optimizer(mine)
    scaler = torch.amp.GradScaler(
        "cpu",
        init_scale=HOW.initial,
        growth_factor=HOW.growth,
        backoff_factor=HOW.backoff,
        growth_interval=HOW.interval,
    )
    scales, norms = [], []
    for x in batches():
        steps.zero_grad()
        scaler.scale(mine(x)).backward()
        scaler.unscale_(steps)
        norms.append(float(nn.utils.clip_grad_norm_(mine.parameters(), CLIP)))
        scaler.step(steps)
        scaler.update()
        scales.append(scaler.get_scale())
    made = float(next(iter(steps.state.values()))["step"])
    return scales, norms, {n: p.detach() for n, p in mine.named_parameters()}, made


def test_the_case_overflows_and_grows() -> None:
    scales, _, _, made = by_torch()
    assert min(scales) < HOW.initial and any(b > a for a, b in itertools.pairwise(scales))
    assert 0 < made < 10


@pytest.mark.parametrize(
    "plan",
    ["ddp=1", "ddp=4", "zero1=4", "fsdp=4,prefetch", "fsdp=2,micro=2", "ddp=2,tp=2", "tp=4", "pp=2,micro=2",
     "pp=2,fsdp=2,micro=2", "fsdp=4,numerics=safe"],
)  # fmt: skip
def test_every_plan_does_what_grad_scaler_does(plan: str) -> None:
    scales, norms, weights, made = by_torch()
    compiled = compile_plan(program(), preset(plan, program(), None, FP16))
    cluster = VirtualCluster(compiled, from_module(model()))
    for x, scale, norm in zip(batches(), scales, norms, strict=True):
        result = cluster.step({"x": x})
        held = [t for h in cluster.holdings for n, t in h.state.items() if n.endswith("/loss_scale")]
        assert {t.item() for t in held} == {scale}
        assert result.norm is not None and math.isfinite(result.norm) == math.isfinite(norm)
        if math.isfinite(norm):
            assert result.norm == pytest.approx(norm, rel=1e-3)
    steps = {t.item() for h in cluster.holdings for n, t in h.state.items() if n.endswith("/step")}
    assert steps == {made}
    for name, weight in cluster.full_parameters().items():
        torch.testing.assert_close(weight, weights[name], rtol=5e-3, atol=1e-3)


def test_an_overflow_on_one_rank_is_seen_by_all() -> None:
    """Only the samples of the last of four ranks are too large: no rank makes the step."""
    compiled = compile_plan(program(), preset("ddp=4", program(), None, FP16))
    cluster = VirtualCluster(compiled, from_module(model()))
    before = cluster.full_parameters()
    x = batches()[0]
    x[-2:] *= 900
    cluster.step({"x": x})
    for name, weight in cluster.full_parameters().items():
        assert torch.equal(weight, before[name])
    for holdings in cluster.holdings:
        assert {t.item() for n, t in holdings.state.items() if n.endswith("/loss_scale")} == {HOW.initial / 2}
        assert all(not t.any() for n, t in holdings.state.items() if "exp_avg" in n)


def test_other_precisions_have_no_scale() -> None:
    made = model()
    for precision in (None, Precision("bf16", "fp32", "fp32"), Precision("fp32", "fp32", "fp16")):
        found = capture(made, {"x": batches()[0]}, optimizer(made), precision=precision)
        assert not any("loss_scale" in name for name in found.state)
