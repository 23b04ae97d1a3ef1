"""One small step for each kind of finding."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from meshwright.compiler.graph.pipeline_program import Compiled
from meshwright.compiler.graph.program import StepProgram
from meshwright.compiler.passes.pipeline import compile_plan
from meshwright.compiler.passes.presets import preset
from meshwright.compiler.plan import Numerics, Precision
from meshwright.frontend.capture import capture

HALF = Precision("bf16", "bf16", "bf16")
MIXED = Precision("bf16", "fp32", "fp32")
SENT = Precision("bf16", "fp32", "bf16")
BATCH = 64


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-4)


class Linear(nn.Module):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, width) / 8)

    def forward(self, x: Tensor) -> Tensor:
        return (x.to(self.weight.dtype) @ self.weight).float().square().mean()


class Scattered(nn.Module):
    """Adds rows up by ``index_put``: of random signs, or squares."""

    def __init__(self, squares: bool = False) -> None:
        super().__init__()
        self.squares = squares
        self.weight = nn.Parameter(torch.randn(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        rows = x[:, :8].to(self.weight.dtype) @ self.weight
        rows = rows * rows if self.squares else rows
        places = torch.arange(rows.shape[0]) % 2
        return torch.zeros(2, 8, dtype=rows.dtype).index_put((places,), rows, accumulate=True).float().square().mean()


class Normal(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(64)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x.to(self.norm.weight.dtype)).float().pow(3).mean()


class Reused(nn.Module):
    """A weight that is used ten times."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(64, 64) / 8)

    def forward(self, x: Tensor) -> Tensor:
        h = x.to(self.weight.dtype)
        for _ in range(10):
            h = torch.tanh(h @ self.weight)
        return h.float().square().mean()


class LowLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(64, 64) / 8)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = (x.to(self.weight.dtype) @ self.weight).square().mean()
        return made


class Summed(nn.Module):
    """Sums in half precision: of one sign, divided by three, and of values just rounded."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.weight = nn.Parameter(torch.randn(64) / 8)

    def forward(self, x: Tensor) -> Tensor:
        h = x.to(self.weight.dtype) * self.weight
        if self.how == "average":
            return (h.sum(0) / 3).float().square().mean()
        if self.how == "rounded":
            return h.float().exp().to(self.weight.dtype).sum(0).float().mean()
        return h.sum(0).float().square().mean()


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(64) / 8)
        self.register_buffer("seen", torch.zeros((), dtype=torch.bfloat16))

    def forward(self, x: Tensor) -> Tensor:
        self.seen = self.seen + 1.0
        return (x * self.weight).square().mean()


@dataclass(frozen=True)
class Case:
    """A step that has a finding of the code."""

    model: Callable[[], nn.Module]
    precision: Precision | None
    plan: str
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = sgd
    batch: int = BATCH

    def data(self) -> dict[str, Tensor]:
        torch.manual_seed(1)
        return {"x": torch.randn(self.batch, 64)}

    def made(self) -> nn.Module:
        torch.manual_seed(0)
        return self.model()

    def program(self) -> StepProgram:
        model = self.made()
        return capture(model, self.data(), self.optimizer(model), clip=1.0, precision=self.precision)

    def compiled(self, numerics: Numerics = "as-written") -> Compiled:
        program = self.program()
        return compile_plan(program, replace(preset(self.plan, program, None, self.precision), numerics=numerics))


FP16 = Precision("fp16", "fp32", "fp16")

CASES: dict[str, Case] = {
    "E0720": Case(Linear, SENT, "ddp=4"),
    "E0721": Case(Linear, FP16, "ddp=4"),
    "E0722": Case(lambda: Summed("average"), MIXED, "ddp=2"),
    "E0723": Case(Linear, SENT, "ddp=2,micro=8"),
    "E0724": Case(Reused, MIXED, "ddp=2"),
    "E0725": Case(Scattered, MIXED, "ddp=1"),
    "E0726": Case(Linear, HALF, "ddp=2", adamw),
    "E0727": Case(Counting, None, "ddp=1"),
    "E0728": Case(LowLoss, MIXED, "ddp=2"),
    "E0729": Case(Linear, HALF, "ddp=2", adamw),
    "E0730": Case(lambda: Linear().bfloat16(), None, "ddp=4,micro=4"),
    "E0731": Case(Linear, SENT, "ddp=2,fsdp=2"),
    "E0732": Case(lambda: Scattered(squares=True), MIXED, "ddp=1", batch=512),
}
