"""A model of repeated blocks, so small that every op of its step can be named: for tests of recompute and offload."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from meshwright.compiler.graph.program import StepProgram
from meshwright.frontend.capture import capture

WIDTH, SAMPLES = 8, 8


class MLP(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, width + 2)
        self.down = nn.Linear(width + 2, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.down(torch.tanh(self.up(x)))
        return made


class Block(nn.Module):
    """A norm and an MLP with dropout, beside the stream."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mlp = MLP(width)
        self.drop = nn.Dropout(0.25)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = x + self.drop(self.mlp(self.norm(x)))
        return made


class Stack(nn.Module):
    """An embedding, blocks, and a mean of squares as loss."""

    def __init__(self, layers: int = 3, width: int = WIDTH) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.head = nn.Linear(width, 1)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        loss: Tensor = self.head(x).square().mean()
        return loss


def model(layers: int = 3, width: int = WIDTH) -> Stack:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Stack(layers, width).double()


def batch() -> dict[str, Tensor]:
    return {"tokens": torch.randint(11, (SAMPLES, 3), generator=torch.Generator().manual_seed(1))}


def step(layers: int = 3) -> StepProgram:
    made = model(layers)
    return capture(made, batch(), torch.optim.SGD(made.parameters(), lr=0.1))
