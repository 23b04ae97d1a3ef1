"""Examples of reads and writes at places that data decides."""

import torch


def x(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64)


def index(high: int, *shape: int) -> torch.Tensor:
    return torch.randint(0, high, shape)


DISTINCT = torch.stack([torch.randperm(9)[:5] for _ in range(7)])
ROWS, COLUMNS = torch.tensor([0, 3, 6, 1, 1]), torch.tensor([2, 7, 0, 4, 4])

EXAMPLES = [
    ("aten.index.Tensor", (x(7, 8, 9), [index(7, 5)]), {}),
    ("aten.index.Tensor", (x(7, 8, 9), [None, index(8, 5, 11)]), {}),
    ("aten.index.Tensor", (x(7, 8, 9), [index(7, 5), None, index(9, 11, 1)]), {}),
    ("aten.index.Tensor", (x(7, 8, 9), [index(7, 5, 1), index(8, 11)]), {}),
    ("aten._unsafe_index.Tensor", (x(7, 8, 9), [None, None, index(9, 5)]), {}),
    ("aten.index_put.default", (x(7, 8, 9), [ROWS, COLUMNS], x(5, 9), True), {}),
    ("aten.index_put.default", (x(7, 8, 9), [None, torch.randperm(8)[:5]], x(7, 5, 1)), {}),
    ("aten._unsafe_index_put.default", (x(7, 8), [ROWS], x(5, 8), True), {}),
    ("aten.index_select.default", (x(7, 8, 9), 1, index(8, 5)), {}),
    ("aten.index_add.default", (x(7, 8, 9), 1, COLUMNS, x(7, 5, 9)), {}),
    ("aten.gather.default", (x(7, 8, 9), 2, index(9, 7, 8, 5)), {}),
    ("aten.gather.default", (x(7, 8), 1, index(8, 5, 5)), {}),
    ("aten.scatter.src", (x(7, 9), 1, DISTINCT, x(7, 5)), {}),
    ("aten.scatter.value", (x(7, 9), 1, DISTINCT, 3.0), {}),
    ("aten.scatter_add.default", (x(7, 9), 1, index(9, 7, 5), x(7, 5)), {}),
    ("aten.scatter_reduce.two", (x(7, 9), 1, index(9, 7, 5), x(7, 5), "amax"), {}),
    ("aten.one_hot.default", (index(9, 7, 8), 9), {}),
    ("aten.bucketize.Tensor", (x(7, 8), torch.arange(-2.0, 3.0, dtype=torch.float64)), {}),
]
