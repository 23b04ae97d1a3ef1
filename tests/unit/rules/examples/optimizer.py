"""Examples of what optimizers use."""

import torch


def x(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64)


def positive(*shape: int) -> torch.Tensor:
    return torch.rand(shape, dtype=torch.float64) + 0.5


A = (7, 8)

EXAMPLES = [
    ("aten.lerp.Scalar", (x(*A), x(*A), 0.1), {}),
    ("aten.lerp.Tensor", (x(*A), x(*A), x()), {}),
    ("aten.addcmul.default", (x(*A), x(*A), x(*A)), {"value": 0.3}),
    ("aten.addcdiv.default", (x(*A), x(*A), positive(*A)), {"value": 0.3}),
    ("aten.addcdiv.default", (x(*A), x(*A), positive()), {}),
    ("aten.sqrt.default", (positive(*A),), {}),
    ("aten.pow.Scalar", (0.9, positive()), {}),
    ("meshwright.sum_of_squares.default", (x(*A),), {}),
    ("meshwright.total.default", ([x(), x(), x()],), {}),
]
