"""Examples of softmax and its backward."""

import torch


def x(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64)


EXAMPLES = [
    ("aten._softmax.default", (x(7, 8, 9), -1, False), {}),
    ("aten._safe_softmax.default", (x(7, 8), 1), {}),
    ("aten.softmax.int", (x(7, 8), 1), {}),
    ("aten.log_softmax.int", (x(7, 8), 1), {}),
    ("aten._log_softmax.default", (x(7, 8, 9), 1, False), {}),
    ("aten._softmax_backward_data.default", (x(7, 8), x(7, 8), -1, torch.float64), {}),
    ("aten._log_softmax_backward_data.default", (x(7, 8), x(7, 8), 0, torch.float64), {}),
]
