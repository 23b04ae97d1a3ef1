"""A sum whose addends were made in fp32 is paid in fp32, also where it is cast to half precision after."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, fx, nn

from meshwright.compiler.graph import collectives
from meshwright.compiler.mesh import Mesh, parse_sharding
from meshwright.compiler.passes.compile import compile_step
from meshwright.compiler.plan import ParameterPlan, Plan, Precision
from meshwright.frontend.capture import capture

MIXED = Precision("bf16", "fp32", "fp32")


class Narrowed(nn.Module):
    """A product that is computed in one dtype and then cast to another."""

    def __init__(self, made: torch.dtype, used: torch.dtype) -> None:
        super().__init__()
        self.made, self.used = made, used
        self.w = nn.Parameter(torch.randn(16, 8))

    def forward(self, x: Tensor) -> Tensor:
        y = (x.to(self.made) @ self.w.to(self.made)).to(self.used)
        return torch.tanh(y).float().square().mean()


def sums(made: torch.dtype, used: torch.dtype) -> list[torch.dtype]:
    """The dtypes in which the forward pass pays sums of activations, where the product's inner dim is cut."""
    model = Narrowed(made, used)
    program = capture(model, {"x": torch.randn(4, 16)}, torch.optim.SGD(model.parameters(), lr=0.1), precision=MIXED)
    plan = Plan(Mesh((("tensor", 4),)), parameters=(ParameterPlan("w", parse_sharding("[16@tensor, 8]")),))
    return [n.args[0].meta["val"].dtype for n in _reductions(compile_step(program, plan).micro.module.graph)]


def _reductions(graph: fx.Graph) -> Iterator[fx.Node]:
    return (n for n in graph.nodes if n.target is collectives.all_reduce and n.args[0].meta["val"].dim() > 1)


def test_addends_in_fp32_are_summed_in_fp32() -> None:
    assert sums(torch.float32, torch.bfloat16) == [torch.float32]


def test_addends_in_half_precision_are_sent_so() -> None:
    """Before they are widened, in fewer bytes: how they are added is for the plan's numerics to say."""
    assert sums(torch.bfloat16, torch.float32) == [torch.bfloat16]
    assert sums(torch.bfloat16, torch.bfloat16) == [torch.bfloat16]
