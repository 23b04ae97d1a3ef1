"""Precisions as texts: those of ``--precision``, of factories and, said alike, of ``.mw`` files."""

from __future__ import annotations

import pytest

from meshwright.compiler.diagnostics import MeshwrightError
from meshwright.compiler.plan import Precision
from meshwright.compiler.precision_text import parse_precision


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("bf16", Precision("bf16")),
        (" fp64 ", Precision("fp64")),
        ("bf16 compute", Precision("bf16", "fp32", "fp32")),
        ("bf16 compute, bf16 weights", Precision("bf16", "bf16", "fp32")),
        ("fp32 reductions,bf16  weights , bf16", Precision("bf16", "bf16", "fp32")),
        ("bf16 reductions", Precision("fp32", "fp32", "bf16")),
    ],
)
def test_what_is_meant(text: str, meant: Precision) -> None:
    assert parse_precision(text) == meant


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "unknown precision ''"),
        ("bf16,", "unknown precision ''"),
        ("fp8", "unknown precision 'fp8'"),
        ("compute bf16", "unknown precision 'compute'"),
        ("bf16 for speed", "unknown use 'for speed' of a precision"),
        ("bf16, fp32 compute", "the precision of 'compute' is said twice"),
    ],
)
def test_what_is_no_precision(text: str, told: str) -> None:
    with pytest.raises(MeshwrightError) as fault:
        parse_precision(text)
    (one,) = fault.value.diagnostics
    assert (one.code, one.message) == ("E0321", told) and one.action
