"""Examples of norms."""

import torch

# the op has no CPU kernel of its own
LIBRARY = torch.library.Library("aten", "IMPL")
BACKWARD = torch.ops.aten._fused_rms_norm_backward.default
LIBRARY.impl("_fused_rms_norm_backward", torch._decomp.decomposition_table[BACKWARD], "CPU")


def x(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64)


def positive(*shape: int) -> torch.Tensor:
    return torch.rand(shape, dtype=torch.float64) + 0.5


ALL = [True, True, True]
ROWS = (7, 8, 1)
IMAGE = (7, 32, 3, 5)

EXAMPLES = [
    ("aten.native_layer_norm.default", (x(7, 8, 9), [9], x(9), x(9), 1e-5), {}),
    ("aten.native_layer_norm.default", (x(7, 8, 9), [8, 9], None, None, 1e-5), {}),
    (
        "aten.native_layer_norm_backward.default",
        (x(7, 8, 9), x(7, 8, 9), [9], x(*ROWS), positive(*ROWS), x(9), x(9), ALL),
        {},
    ),
    (
        "aten.native_layer_norm_backward.default",
        (x(7, 8, 9), x(7, 8, 9), [9], x(*ROWS), positive(*ROWS), x(9), None, [True, True, False]),
        {},
    ),
    (
        "aten.native_layer_norm_backward.default",
        (x(7, 8, 9), x(7, 8, 9), [9], x(*ROWS), positive(*ROWS), None, None, [True, False, False]),
        {},
    ),
    ("aten._fused_rms_norm.default", (x(7, 8, 9), [9], x(9), 1e-5), {}),
    (
        "aten._fused_rms_norm_backward.default",
        (x(7, 8, 9), x(7, 8, 9), [9], positive(*ROWS), x(9), [True, True]),
        {},
    ),
    ("meshwright.rms_norm.default", (x(7, 8, 9), [9], x(9), 1e-5), {}),
    ("meshwright.rms_norm.default", (x(7, 8, 9), [8, 9], x(8, 9), 1e-5), {}),
    ("meshwright.rms_norm_backward.default", (x(7, 8, 9), x(7, 8, 9), [9], positive(*ROWS), x(9)), {}),
    ("aten.native_group_norm.default", (x(*IMAGE), x(32), x(32), 7, 32, 15, 8, 1e-5), {}),
    (
        "aten.native_group_norm_backward.default",
        (x(*IMAGE), x(*IMAGE), x(7, 8), positive(7, 8), x(32), 7, 32, 15, 8, ALL),
        {},
    ),
    ("aten.native_batch_norm.default", (x(9, 7, 3), x(7), x(7), x(7), positive(7), True, 0.1, 1e-5), {}),
    ("aten.native_batch_norm.default", (x(9, 7, 3), x(7), x(7), x(7), positive(7), False, 0.1, 1e-5), {}),
    ("aten._native_batch_norm_legit.no_stats", (x(9, 7, 3), x(7), x(7), True, 0.1, 1e-5), {}),
    (
        "aten._native_batch_norm_legit_functional.default",
        (x(9, 7, 3), x(7), x(7), x(7), positive(7), True, 0.1, 1e-5),
        {},
    ),
    (
        "aten.native_batch_norm_backward.default",
        (x(9, 7, 3), x(9, 7, 3), x(7), x(7), positive(7), x(7), positive(7), True, 1e-5, ALL),
        {},
    ),
]
