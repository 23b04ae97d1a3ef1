"""Examples of attention: plain, causal, windowed, masked, with dropout."""

from typing import Any

import torch

import meshwright.compiler.graph.ops  # noqa: F401  # registers torch.ops.meshwright


def x(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64)


SEED = torch.tensor([3, 5])
B, H, T, S, C = 4, 5, 7, 9, 3


def form(causal: bool = False, window: int = 0, dropout: float = 0.0) -> tuple[Any, ...]:
    return causal, window, 0.5, dropout, 1, [], []


def forward(mask: Any = None, seed: Any = None, d: int = C, **more: Any) -> tuple[Any, ...]:
    return x(B, H, T, C), x(B, H, S, C), x(B, H, S, d), mask, seed, *form(**more)


def backward(mask: Any = None, seed: Any = None, d: int = C, **more: Any) -> tuple[Any, ...]:
    args = forward(mask, seed, d, **more)
    out, logsumexp = torch.ops.meshwright.attention(*args)
    return x(B, H, T, d), *args[:5], out, logsumexp, *args[5:]


BOOLEAN = torch.rand(B, 1, T, S) < 0.7
FORMS: list[dict[str, Any]] = [
    {},
    {"causal": True},
    {"causal": True, "window": 3},
    {"mask": BOOLEAN},
    {"mask": x(1, H, 1, S), "causal": True},
    {"mask": x(T, S)},
    {"seed": SEED, "dropout": 0.3},
    {"seed": SEED, "dropout": 0.3, "causal": True, "mask": BOOLEAN},
    {"d": 7},
]

EXAMPLES = [
    *[("meshwright.attention.default", forward(**f), {}) for f in FORMS],
    *[("meshwright.attention_backward.default", backward(**f), {}) for f in FORMS],
]
