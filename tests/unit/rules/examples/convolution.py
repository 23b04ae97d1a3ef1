"""Examples of convolutions."""

from typing import Any

import torch


def x(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64)


def form(
    stride: int = 1, padding: int = 0, transposed: bool = False, groups: int = 1, ndim: int = 2
) -> tuple[Any, ...]:
    return [stride] * ndim, [padding] * ndim, [1] * ndim, transposed, [0] * ndim, groups


ALL = [True, True, True]

EXAMPLES = [
    ("aten.convolution.default", (x(7, 9, 6, 6), x(8, 9, 3, 3), x(8), *form(padding=1)), {}),
    ("aten.convolution.default", (x(7, 9, 6, 6), x(8, 9, 3, 3), None, *form(stride=2)), {}),
    ("aten.convolution.default", (x(5, 9, 14, 14), x(8, 9, 2, 2), x(8), *form(stride=2)), {}),
    ("aten.convolution.default", (x(5, 14, 6), x(14, 1, 3), x(14), *form(padding=1, groups=14, ndim=1)), {}),
    ("aten.convolution.default", (x(5, 14, 6), x(35, 2, 3), None, *form(groups=7, ndim=1)), {}),
    ("aten.convolution.default", (x(5, 14, 6), x(14, 5, 3), None, *form(groups=7, ndim=1, transposed=True)), {}),
    ("aten.convolution.default", (x(5, 7, 6), x(7, 9, 3), x(9), *form(stride=2, ndim=1, transposed=True)), {}),
    (
        "aten.convolution_backward.default",
        (x(7, 8, 6, 6), x(7, 9, 6, 6), x(8, 9, 3, 3), [8], *form(padding=1), ALL),
        {},
    ),
    (
        "aten.convolution_backward.default",
        (x(5, 8, 7, 7), x(5, 9, 14, 14), x(8, 9, 2, 2), [8], *form(stride=2), [False, True, True]),
        {},
    ),
    (
        "aten.convolution_backward.default",
        (x(5, 14, 6), x(5, 14, 6), x(14, 1, 3), [14], *form(padding=1, groups=14, ndim=1), ALL),
        {},
    ),
    (
        "aten.convolution_backward.default",
        (x(5, 35, 4), x(5, 14, 6), x(35, 2, 3), None, *form(groups=7, ndim=1), [True, True, False]),
        {},
    ),
]
