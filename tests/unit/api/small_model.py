"""A small language model with a tied head and a buffer, for the tests of the public interface."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY, WIDTH, TIME, SAMPLES = 64, 8, 6, 8


class Language(nn.Module):
    """Returns ``{"loss": ..., "logits": ...}`` if it gets labels, else the logits."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.up = nn.Linear(WIDTH, 16)
        self.down = nn.Linear(16, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("scale", torch.full((), 2.0), persistent=False)

    def forward(self, tokens: Tensor, labels: Tensor | None = None) -> Any:
        self.seen += 1
        x = self.embed(tokens)
        logits = self.head(self.norm(x + self.down(torch.tanh(self.up(x) * self.scale))))
        if labels is None:
            return logits
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


def language(seed: int = 0) -> Language:
    """In float64, with weights that the seed alone decides."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return Language().double()


def batch(number: int) -> dict[str, Tensor]:
    """The batch of a step: tokens, and labels some of which are ignored."""
    generator = torch.Generator().manual_seed(number)
    tokens, labels = (torch.randint(VOCABULARY, (SAMPLES, TIME), generator=generator) for _ in range(2))
    labels[torch.rand(labels.shape, generator=generator) < 0.3] = -100
    return {"tokens": tokens, "labels": labels}


def loss_of(output: Any, batch: Any) -> Tensor:
    """A loss function for batches of every form; of a keyword batch the model gets all that it takes."""
    logits = output["logits"] if isinstance(output, dict) else output
    if isinstance(batch, tuple):
        args, kwargs = batch if isinstance(batch[-1], dict) else (batch, {})
        labels = kwargs["labels"] if "labels" in kwargs else args[1]
    else:
        labels = batch["labels"]
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)


def schedule(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    """A rate that is another at every step."""
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)


def eager_steps(model: Language, steps: int, clip: float | None = None, first: int = 0) -> list[float]:
    """Plain PyTorch, in place: the losses, with the scheduler stepping."""
    optimizer = adamw(model)
    rates = schedule(optimizer)
    losses = []
    for number in range(first, first + steps):
        optimizer.zero_grad()
        loss = model(**batch(number))["loss"]
        loss.backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        rates.step()
        losses.append(loss.item())
    return losses
