"""Examples of ops that make tensors."""

import torch

X = torch.randn(7, 8, dtype=torch.float64)
SHAPE = [7, 8, 1]
F64 = {"dtype": torch.float64}

EXAMPLES = [
    ("aten.zeros.default", (SHAPE,), F64),
    ("aten.ones.default", (SHAPE,), F64),
    ("aten.full.default", (SHAPE, 3.0), F64),
    ("aten.full.default", ([], 3.0), F64),
    ("aten.new_zeros.default", (X, SHAPE), {}),
    ("aten.new_ones.default", (X, SHAPE), {}),
    ("aten.new_full.default", (X, SHAPE, 3.0), {}),
    ("aten.zeros_like.default", (X,), {}),
    ("aten.ones_like.default", (X,), {}),
    ("aten.full_like.default", (X, 3.0), {}),
    ("aten.arange.default", (9,), {}),
    ("aten.arange.start_step", (0, 9, 2), {}),
    ("aten.linspace.default", (0, 1, 9), {}),
    ("aten.eye.default", (7,), {}),
    ("aten.scalar_tensor.default", (3.0,), {}),
    ("aten.tril_indices.default", (7, 8), {}),
    ("aten.triu_indices.default", (7, 8), {}),
]
UNDEFINED = ["aten.empty.memory_format", "aten.new_empty.default", "aten.empty_like.default"]
"""Ops whose values nothing may depend on: there is nothing to compare."""
