"""Ops on matrices: any element on all of its matrix, a triangular solve on the rows before."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from meshwright.compiler.causality.call import Call, tensors_in
from meshwright.compiler.causality.registry import rule
from meshwright.compiler.causality.shadow import Shadow, constant
from meshwright.compiler.causality.words import any_over, running


@rule("aten.linalg_solve_triangular", "aten.triangular_solve")
def solve_triangular(call: Call) -> Any:
    """Row i of the solution on rows up to i of the matrix and of the right-hand side, or from i on."""
    matrix, right = (call["A"], call["self"]) if "A" in call.arguments else (call["self"], call["B"])
    upper = bool(call["upper"])
    out = tensors_in(call.out)[0]
    if call.get("left", True) is False or call.get("transpose", False):
        return _per_matrix(call, [matrix, right])
    a, b = call.settled(matrix), call.settled(right)
    size = matrix.shape[-1]
    line = torch.arange(size)
    used = line[None, :] >= line[:, None] if upper else line[None, :] <= line[:, None]
    words = torch.where((used & ~(a.known & (matrix == 0))).unsqueeze(-1), call.words(a), 0)
    rows = any_over(words, (words.dim() - 2,), keepdim=True)  # [..., n, 1, words]
    joined = call.words(b) | rows
    dim = joined.dim() - 3
    joined = running(joined.flip(dim), dim).flip(dim) if upper else running(joined, dim)
    made = Shadow(constant(out.shape, False).known, joined.expand(*out.shape, call.width))
    return made if isinstance(call.out, Tensor) else (made, call.settled(matrix).plain())


@rule(
    *(f"aten.{name}" for name in ("linalg_inv_ex", "linalg_cholesky_ex", "cholesky", "linalg_solve_ex", "linalg_qr")),
    *(f"aten.{name}" for name in ("_linalg_solve_ex", "linalg_lu_factor_ex", "linalg_eigh", "_linalg_eigh")),
    *(
        f"aten.{name}"
        for name in ("_linalg_svd", "linalg_matrix_exp", "inverse", "linalg_pinv", "_linalg_slogdet", "_linalg_det")
    ),
)
def matrix_op(call: Call) -> Any:
    """Each matrix by itself."""
    return _per_matrix(call, call.tensors())


def _per_matrix(call: Call, values: list[Tensor]) -> Any:
    outs = tensors_in(call.out)
    union: Tensor | None = None
    for value in values:
        words = call.words(call.settled(value))
        dims = [d for d in (words.dim() - 3, words.dim() - 2) if d >= 0]
        joined = any_over(words, dims, keepdim=True)
        union = joined if union is None else union | joined
    assert union is not None
    batch = union.dim() - 3
    made = []
    for out in outs:
        own = union.reshape(*union.shape[:batch], *[1] * max(out.dim() - batch, 0), call.width)
        made.append(Shadow(constant(out.shape, False).known, own.expand(*out.shape, call.width)))
    return made[0] if isinstance(call.out, Tensor) else tuple(made)
