"""A small stack of blocks between a table and a head that is the table, for the field cases that cut by depth."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.runtime.rendezvous import Call, Rendezvous
from meshwright.runtime.virtual import VirtualCluster
from tests.field.against_one_device import Batch, Case

VOCABULARY, WIDTH, INNER, TIME, SAMPLES = 16, 8, 12, 4, 8


class Block(nn.Module):
    """Normalised, wider, bent, narrow again."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Stack(nn.Module):
    """The loss of the words that count, ``-100`` does not."""

    def __init__(self, blocks: int = 4, make: Callable[[], nn.Module] = Block) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(make() for _ in range(blocks))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def batch(seed: int, samples: int = SAMPLES) -> Batch:
    """Of the samples' words ever more count, of the first none."""
    generator = torch.Generator().manual_seed(seed)
    tokens, labels = (torch.randint(VOCABULARY, (samples, TIME), generator=generator) for _ in range(2))
    counts = torch.arange(samples)[:, None] % (TIME + 1)
    return {"tokens": tokens, "labels": labels.where(torch.arange(TIME)[None, :] < counts, -100)}


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)


@cache
def case(make: Callable[[], nn.Module] = Stack, steps: int = 2, samples: int = SAMPLES) -> Case:
    """A seeded model under AdamW with clipping, which a wrong norm would show in every weight."""
    torch.manual_seed(0)
    return Case(make().double(), [batch(step, samples) for step in range(steps)], optimizer=adamw, clip=0.5)


Said = dict[int, list[str]]
"""By rank, what it says to others, in order: collectives with their shapes, messages with those of what they carry."""


def said_in(cluster: VirtualCluster, one: Batch, monkeypatch: pytest.MonkeyPatch) -> Said:
    """All that the ranks say in a step."""
    said: Said = {rank: [] for rank in range(cluster.mesh.ranks)}
    exchange, send = Rendezvous.exchange, Rendezvous.send

    def recording(self: Rendezvous, rank: int, group: tuple[int, ...], call: Call, *rest: Any) -> Any:
        said[rank].append(f"{call} of {group}")
        return exchange(self, rank, group, call, *rest)

    def sending(self: Rendezvous, rank: int, target: int, name: str, tensors: Any) -> None:
        said[rank].append(f"{name} to {target}: {[list(t.shape) for t in tensors]}")
        send(self, rank, target, name, tensors)

    with monkeypatch.context() as patched:
        patched.setattr(Rendezvous, "exchange", recording)
        patched.setattr(Rendezvous, "send", sending)
        cluster.step(one)
    return said
