"""The table of accumulators is what this device does."""

from __future__ import annotations

import pytest
import torch

from meshwright.compiler.numerics.accumulators import backends, keeps_half, measured
from meshwright.runtime.accumulators import PROBES, probe

AGAIN = (
    "aten.index_put.default",
    "aten.index_add.default of vectors",
    "aten.embedding_dense_backward.default",
    "aten.native_layer_norm_backward.default",
    "meshwright.embedding_backward.default",
    "aten.sum.dim_IntList",
    "aten.mm.default",
)


@pytest.mark.parametrize("op", AGAIN)
def test_a_second_probe_finds_what_the_table_says(op: str) -> None:
    name = op.partition(" ")[0]
    for dtype, short in ((torch.bfloat16, "bf16"), (torch.float16, "f16")):
        assert probe(op, dtype).half == (measured("cpu")[short][name].keeps == "half")


def test_the_table_has_every_probe() -> None:
    assert "cpu" in backends()
    for dtype in ("bf16", "f16"):
        assert set(measured("cpu")[dtype]) == {op.partition(" ")[0] for op in PROBES}


def test_what_was_measured_to_lose() -> None:
    """The facts that the findings rest on: 300 ones that a row gets are 256."""
    ones = torch.ones(300, 4, dtype=torch.bfloat16)
    row = torch.zeros(300, dtype=torch.int64)
    put = torch.zeros(1, 4, dtype=torch.bfloat16).index_put((row,), ones, accumulate=True)
    assert put.eq(256).all() and keeps_half("aten.index_put.default", "bf16", "cpu")
    assert torch.zeros(1, dtype=torch.bfloat16).index_add(0, row, ones[:, 0]).item() == 256


def test_variants_count_as_the_op_that_was_probed() -> None:
    assert keeps_half("aten.index_put.out", "bf16", "cpu")
    assert not keeps_half("aten.sum.default", "bf16", "cpu")
    assert not keeps_half("aten.index_put.default", "f32", "cpu")
    assert not keeps_half("aten.index_put.default", "bf16", "an unknown backend")
