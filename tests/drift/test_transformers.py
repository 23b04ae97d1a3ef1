"""Architectures of ``transformers``: none drifts, but one that says so itself."""

from __future__ import annotations

import pytest

import meshwright
from tests.causality.architectures import ARCHITECTURES

QUICK = ("Llama", "GPT-2", "Qwen3", "Mamba2")
FURTHER = ("Llama, eager", "Gemma3", "Mixtral", "DeepSeek-V3", "LFM2")


def _clean(name: str) -> None:
    one = ARCHITECTURES[name]
    found = meshwright.drift(one.build(), one.batch())
    assert not found.findings and not found.skipped, found.text()
    assert found.measured == 0
    assert found.decoding is not None and found.decoding < 1e-12
    assert found.lengths is not None and found.lengths < 1e-12


@pytest.mark.parametrize("name", QUICK)
def test_architecture(name: str) -> None:
    _clean(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", FURTHER)
def test_further_architecture(name: str) -> None:
    _clean(name)


def test_mamba_begins_each_piece_with_an_empty_state() -> None:
    """Token by token it goes on from the state; a longer piece after the first begins at zero, as its source says."""
    one = ARCHITECTURES["Mamba"]
    found = meshwright.drift(one.build(), one.batch())
    assert [f.code for f in found.findings] == ["E0775"], found.text()
    assert "piece by piece: position 6" in found.text() and "ssm_state" in found.text()


def test_attention_whose_bias_is_trained_is_fused_in_evaluation_alone() -> None:
    one = ARCHITECTURES["T5"]
    found = meshwright.drift(one.build(), one.batch())
    assert {f.code for f in found.findings} == {"E0772"}, found.text()
    assert found.measured is not None and 0.1 < found.predicted / found.measured < 10
