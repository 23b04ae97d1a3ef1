"""Examples of table lookups."""

import torch


def x(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64)


INDEX = torch.randint(0, 11, (7, 8))
INDEX[0, :3] = torch.tensor([0, 5, 10])

EXAMPLES = [
    ("meshwright.embedding.default", (x(11, 9), INDEX, 0, -1), {}),
    ("meshwright.embedding.default", (x(11, 9), INDEX, 0, 3), {}),
    ("meshwright.embedding_backward.default", (x(7, 8, 9), INDEX, 11, 0, -1), {}),
    ("meshwright.embedding_backward.default", (x(7, 8, 9), INDEX, 11, 0, 3), {}),
    ("aten.embedding.default", (x(11, 9), INDEX), {}),
    ("aten.embedding_dense_backward.default", (x(7, 8, 9), INDEX, 11, -1, False), {}),
    ("aten.embedding_dense_backward.default", (x(7, 8, 9), INDEX, 11, 3, True), {}),
]
