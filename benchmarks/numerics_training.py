"""Training with gradients that are summed over 64 ranks in bf16: as written, and with sums in fp32.

    python -m benchmarks.numerics_training [--ranks 64] [--steps 64]

Least squares with labels that no weights fit exactly: at the optimum the gradients of the ranks are not zero, but their
sum is. All samples are in every batch, so nothing but rounding keeps the loss from its least value, which is known. The
steps are run by the virtual cluster, which adds as a ring does, one rank after the other.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from meshwright.compiler.numerics import findings
from meshwright.compiler.passes.pipeline import compile_plan
from meshwright.compiler.passes.presets import preset
from meshwright.compiler.plan import Numerics, Precision
from meshwright.frontend.capture import capture
from meshwright.runtime.materialize import from_module
from meshwright.runtime.virtual import VirtualCluster

WIDTH, SAMPLES = 64, 8
"""Of the input, and on each rank."""
RATE = 0.35


class Regression(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return (x @ self.w - y).square().mean()


@dataclass(frozen=True)
class Problem:
    """Data, and the least loss that there is."""

    x: Tensor
    y: Tensor
    least: float


def problem(ranks: int) -> Problem:
    """Samples whose labels are half noise. The noise of the first half of the ranks pulls one way, that of the others
    the other way, as data do that lie sorted on a disk."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(ranks * SAMPLES, WIDTH, generator=generator)
    truth = torch.randn(WIDTH, generator=generator)
    pull = torch.randn(WIDTH, generator=generator)
    side = torch.where(torch.arange(ranks * SAMPLES) < ranks * SAMPLES // 2, 1.0, -1.0)
    y = x @ truth + side * (x @ pull) + torch.randn(ranks * SAMPLES, generator=generator)
    best = torch.linalg.lstsq(x.double(), y.double()[:, None]).solution[:, 0]
    return Problem(x, y, float((x.double() @ best - y.double()).square().mean()))


def excess(given: Problem, ranks: int, policy: Numerics, reduce: str, steps: int, every: int) -> list[float]:
    """How far the loss of the weights is above the least, every so many steps."""
    model = Regression()
    precision = Precision("fp32", "fp32", reduce)
    batch = {"x": given.x, "y": given.y}
    program = capture(model, batch, torch.optim.SGD(model.parameters(), lr=RATE), precision=precision)
    plan = replace(preset(f"ddp={ranks}", program, None, precision), numerics=policy)
    compiled = compile_plan(program, plan)
    if policy == "as-written":
        for found in findings(compiled):
            print(found.diagnostic.render())
    cluster = VirtualCluster(compiled, from_module(model))
    kept = []
    for step in range(1, steps + 1):
        cluster.step(batch)
        if step % every == 0:
            w = cluster.full_parameters()["w"].double()
            kept.append(float((given.x.double() @ w - given.y.double()).square().mean()) - given.least)
    return kept


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--steps", type=int, default=64)
    options = parser.parse_args()
    given = problem(options.ranks)
    every = max(1, options.steps // 8)
    columns: dict[str, list[float]] = {
        "bf16, as written": excess(given, options.ranks, "as-written", "bf16", options.steps, every),
        "bf16, safe": excess(given, options.ranks, "safe", "bf16", options.steps, every),
        "fp32": excess(given, options.ranks, "as-written", "fp32", options.steps, every),
    }
    print(f"loss above the least ({given.least:.3f}), {options.ranks} ranks")
    print("step  " + "".join(f"{name:>18}" for name in columns))
    for row in range(len(columns["fp32"])):
        print(f"{(row + 1) * every:<6}" + "".join(f"{max(values[row], 0):18.2e}" for values in columns.values()))


if __name__ == "__main__":
    main()
