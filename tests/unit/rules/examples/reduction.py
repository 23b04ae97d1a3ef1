"""Examples of reductions over dims."""

import torch


def x(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64)


MASK = torch.rand(7, 8) < 0.5
COUNTS = torch.randint(0, 9, (7, 8))

EXAMPLES = [
    ("aten.sum.dim_IntList", (x(7, 8, 9), [0, -1], True), {}),
    ("aten.sum.dim_IntList", (x(7, 8), []), {}),
    ("aten.sum.default", (x(7, 8),), {}),
    ("aten.sum.default", (MASK,), {}),
    ("aten.sum.dim_IntList", (COUNTS, [1]), {}),
    ("aten.mean.dim", (x(7, 8), [-1], True), {}),
    ("aten.mean.default", (x(7, 8),), {}),
    ("aten.amax.default", (x(7, 8), [-1]), {}),
    ("aten.amax.default", (COUNTS, [-1]), {}),
    ("aten.amin.default", (x(7, 8), [0], True), {}),
    ("aten.max.default", (x(7, 8),), {}),
    ("aten.max.dim", (x(7, 8), -1), {}),
    ("aten.max.other", (x(7, 8), x(8)), {}),
    ("aten.min.default", (x(7, 8),), {}),
    ("aten.min.dim", (x(7, 8), 0, True), {}),
    ("aten.logsumexp.default", (x(7, 8), [-1], True), {}),
    ("aten.any.default", (MASK,), {}),
    ("aten.any.dim", (MASK, 1), {}),
    ("aten.all.dim", (MASK, 1, True), {}),
    ("aten.prod.dim_int", (x(7, 8), 1), {}),
    ("aten.argmax.default", (x(7, 8), -1), {}),
    ("aten.argmax.default", (x(7, 8),), {}),
    ("aten.argmin.default", (x(7, 8), -1, True), {}),
    ("aten.median.dim", (x(7, 8), 1), {}),
    ("aten.mode.default", (x(7, 8), 1), {}),
    ("aten.kthvalue.default", (x(7, 8), 2, 1), {}),
    ("aten.var.correction", (x(7, 8), [1]), {"correction": 0, "keepdim": True}),
    ("aten.var.dim", (x(7, 8), [1], True, True), {}),
    ("aten.std.correction", (x(7, 8),), {}),
    ("aten.var_mean.correction", (x(7, 8), [-1]), {"keepdim": True}),
    ("aten.linalg_vector_norm.default", (x(7, 8), 2, [1], True), {}),
    ("aten.linalg_vector_norm.default", (x(7, 8),), {}),
    ("aten.norm.ScalarOpt_dim", (x(7, 8), 2, [1], True), {}),
    ("aten.cumsum.default", (x(7, 8), 1), {}),
    ("aten.cumprod.default", (x(7, 8), -1), {}),
    ("aten.logcumsumexp.default", (x(7, 8), 1), {}),
    ("aten.cummax.default", (x(7, 8), 1), {}),
    ("aten.cummin.default", (x(7, 8), 1), {}),
    ("aten.sort.default", (x(7, 8), 0), {}),
    ("aten.sort.stable", (x(7, 8),), {"stable": True, "dim": 0}),
    ("aten.topk.default", (x(7, 8), 3), {}),
    ("aten.topk.default", (x(7, 8), 1, 0), {}),
]
