"""What the models of this folder are made with: embedding, something between positions, head; and what is expected."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

ROWS, LENGTH, WORDS, WIDTH = 2, 16, 40, 16


@dataclass(frozen=True)
class Case:
    """A model with its verdict. ``build`` gives the model and the arguments of ``meshwright.check``."""

    name: str
    build: Callable[[], tuple[Any, Any, dict[str, Any]]]
    verdict: str
    leaks: frozenset[str]
    slow: bool = False


CASES: dict[str, Case] = {}


def expect(
    verdict: str, *leaks: str, batch: Callable[[], Any] | None = None, train: bool = False, **options: Any
) -> Any:
    """Register a class of models, made without arguments, or a function that is the model itself."""

    def register(thing: Any) -> Any:
        def build() -> tuple[Any, Any, dict[str, Any]]:
            torch.manual_seed(1)
            model = thing() if isinstance(thing, type) else thing
            if isinstance(model, nn.Module):
                model.train(train)
            return model, ids() if batch is None else batch(), options

        assert thing.__name__ not in CASES, thing.__name__
        CASES[thing.__name__] = Case(thing.__name__, build, verdict, frozenset(leaks))
        return thing

    return register


def ids(rows: int = ROWS, length: int = LENGTH) -> Tensor:
    """Token ids."""
    return torch.randint(1, WORDS, (rows, length), generator=torch.Generator().manual_seed(5))


def floats(rows: int = ROWS, length: int = LENGTH) -> Tensor:
    """Activations."""
    return torch.randn(rows, length, WIDTH, generator=torch.Generator().manual_seed(5))


def segments() -> Tensor:
    """Documents of the rows."""
    return torch.tensor([[0] * 5 + [1] * 6 + [2] * 5, [0] * 7 + [1] * 2 + [2] * 7])


def packed() -> dict[str, Tensor]:
    """Ids with the documents that they belong to."""
    return {"ids": ids(), "seg": segments()}


class Tokens(nn.Module):
    """Embedding, ``mix`` with a residual, head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.head = nn.Linear(WIDTH, WORDS)
        self.make()

    def make(self) -> None:
        """Parameters of ``mix``."""

    def mix(self, h: Tensor) -> Tensor:
        """What goes between positions, ``[rows, positions, features]``."""
        raise NotImplementedError

    def forward(self, ids: Tensor) -> Tensor:
        h = self.embed(ids)
        return self.head(h + self.mix(h))


class Attends(Tokens):
    """Attention with ``bias`` ``[positions, positions]`` added to the scores."""

    def make(self) -> None:
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)

    def scores(self, h: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v = self.qkv(h).chunk(3, -1)
        return q @ k.transpose(1, 2) / WIDTH**0.5, v

    def masked(self, scores: Tensor) -> Tensor:
        raise NotImplementedError

    def mix(self, h: Tensor) -> Tensor:
        scores, v = self.scores(h)
        return self.masked(scores).softmax(-1) @ v


def lower(size: int, diagonal: int = 0) -> Tensor:
    """True where the key is not after the query."""
    return torch.ones(size, size, dtype=torch.bool).tril(diagonal)
