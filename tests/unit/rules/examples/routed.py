"""Examples of products of rows that have weights of their own, and of counts."""

import torch


def x(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64)


def group(high: int, *shape: int) -> torch.Tensor:
    return torch.randint(0, high, shape)


ENDS = torch.tensor([3, 3, 8, 11, 13])

EXAMPLES = [
    ("meshwright.routed_mm.default", (x(13, 7), x(5, 7, 9), group(5, 13)), {}),
    ("meshwright.routed_outer.default", (x(13, 7), x(13, 9), group(5, 13), 5), {}),
    ("meshwright.grouped_mm.default", (x(13, 7), x(5, 7, 9), ENDS), {}),
    ("meshwright.grouped_outer.default", (x(13, 7), x(13, 9), ENDS), {}),
    ("meshwright.count.default", (group(5, 13, 7), 5), {}),
    ("meshwright.count.default", (group(5, 13), 11), {}),
    ("aten.histc.default", (group(5, 13, 7).double(), 5, 0, 4), {}),
    ("aten.histc.default", (x(13, 7), 5, -1.5, 0.5), {}),
    ("aten.histc.default", (x(13, 7), 5), {}),
]
