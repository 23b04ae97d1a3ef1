"""A cache against the whole sequence, and one length against another."""

from __future__ import annotations

import pytest
from torch import nn

import meshwright
from tests.drift import models

CACHES: dict[str, tuple[nn.Module, str]] = {
    "positions one too far": (models.Cached(offset=1), "positions"),
    "positions that begin anew": (models.Cached(forget_positions=True), "positions"),
    "keys cut to a window": (models.Cached(window=4), "5 of 7 positions are there"),
    "state of a convolution too short": (models.CachedConvolution(2), "the state of a convolution"),
}


@pytest.mark.parametrize("name", CACHES)
def test_a_cache_that_computes_something_else(name: str) -> None:
    model, cause = CACHES[name]
    found = meshwright.drift(model, models.tokens())
    assert [f.code for f in found.findings] == ["E0775"], found.text()
    text = found.text()
    assert f"likely cause: {cause}" in text
    assert "token by token: position 6 is the first that differs" in text
    assert found.decoding is not None and found.decoding > 1e-3


SAME = {"keys": models.Cached(), "convolution": models.CachedConvolution(3), "state": models.Recurrent()}


@pytest.mark.parametrize("model", SAME.values(), ids=SAME.keys())
def test_a_cache_that_computes_the_same(model: nn.Module) -> None:
    found = meshwright.drift(model, models.tokens())
    assert not found.findings, found.text()
    assert found.decoding is not None and found.decoding < 1e-12 and not found.skipped


@pytest.mark.parametrize("model", [models.ScaledByLength(), models.RotaryByLength()], ids=["logarithm", "table"])
def test_a_constant_made_of_the_length(model: nn.Module) -> None:
    found = meshwright.drift(model, models.tokens())
    assert "E0776" in {f.code for f in found.findings}, found.text()
    assert "given a constant" in found.text() and found.lengths is not None and found.lengths > 1e-3


def test_an_encoder_is_not_compared_at_another_length() -> None:
    found = meshwright.drift(models.Bidirectional(), models.tokens())
    assert not found.findings and found.lengths is None
    assert any("depend on later tokens" in one for one in found.skipped)
    assert any("takes no cache" in one for one in found.skipped)
