"""Examples of gated linear units."""

import torch


def x(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64)


EXAMPLES = [
    ("aten.glu.default", (x(7, 16, 9), 1), {}),
    ("aten.glu_backward.default", (x(7, 9), x(7, 18), -1), {}),
]
