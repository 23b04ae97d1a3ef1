"""The factories of ``examples/llama_shapes.py`` have the published sizes and are what the planner takes."""

from __future__ import annotations

import pytest

from meshwright.compiler.plan import Precision
from meshwright.frontend.source import source_without_weights


@pytest.mark.parametrize(("name", "count"), [("llama_8b", 8.03e9), ("llama_70b", 70.6e9), ("llama_405b", 405.9e9)])
def test_published_sizes(name: str, count: float) -> None:
    source = source_without_weights(f"examples.llama_shapes:{name}", {"batch": 4, "time": 128})
    parameters = list(source.model.parameters())
    assert all(p.is_meta for p in parameters)
    assert sum(p.numel() for p in parameters) == pytest.approx(count, rel=1e-3)
    assert source.precision == Precision("bf16", "fp32", "fp32")
    assert source.batch["input_ids"].shape == (4, 128)
