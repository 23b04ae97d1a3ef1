"""Examples of views that regroup elements."""

import torch


def x(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64)


EXAMPLES = [
    ("aten.view.default", (x(7, 8, 9), [56, 9]), {}),
    ("aten.view.default", (x(56, 9), [7, 8, 9]), {}),
    ("aten.view.default", (x(7, 1, 72), [7, 8, -1, 1]), {}),
    ("aten.view.default", (x(6, 4, 7), [4, 6, 7]), {}),
    ("aten.view.default", (x(1), []), {}),
    ("aten.view.default", (x(7, 1), [7]), {}),
    ("aten._unsafe_view.default", (x(7, 8, 9), [56, 9]), {}),
    ("aten.view_copy.default", (x(7, 8, 9), [56, 9]), {}),
    ("aten.reshape.default", (x(7, 72), [7, 8, 9]), {}),
    ("aten.flatten.using_ints", (x(7, 8, 9), 1), {}),
    ("aten.unflatten.int", (x(7, 72), 1, [8, 9]), {}),
    ("aten.unsqueeze.default", (x(7, 8), -1), {}),
    ("aten.squeeze.dim", (x(7, 1, 8), 1), {}),
    ("aten.squeeze.dim", (x(7, 8), 1), {}),
    ("aten.squeeze.dims", (x(7, 1, 8, 1), [1, 3]), {}),
    ("aten.squeeze.default", (x(7, 1, 8, 1),), {}),
    ("aten.squeeze.dim", (x(2, 1, 3), 0), {}),
    ("aten.squeeze.dims", (x(2, 1, 3), [0, 1]), {}),
    ("aten.expand.default", (x(7, 1, 8), [9, 7, 11, -1]), {}),
    ("aten.expand.default", (x(), [7, 8]), {}),
    ("aten.repeat.default", (x(7, 8), [9, 1, 5]), {}),
    ("aten.permute.default", (x(7, 8, 9), [2, 0, -2]), {}),
    ("aten.transpose.int", (x(7, 8, 9), -1, 0), {}),
    ("aten.swapaxes.default", (x(7, 8, 9), -1, 0), {}),
    ("aten.t.default", (x(7, 8),), {}),
    ("aten.t.default", (x(7),), {}),
    ("aten.numpy_T.default", (x(7, 8, 9),), {}),
    ("aten.mT.default", (x(7, 8, 9),), {}),
    ("aten.movedim.int", (x(7, 8, 9), 0, -1), {}),
    ("aten.movedim.intlist", (x(7, 8, 9), [0, 1], [2, 0]), {}),
]
