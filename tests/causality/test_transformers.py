"""Architectures of ``transformers`` are judged as they should be: decoders causal, encoders not."""

from __future__ import annotations

import pytest

import meshwright
from tests.causality.architectures import ARCHITECTURES

QUICK = ("Llama, eager", "Mixtral", "BERT")


def _case(name: str) -> None:
    one = ARCHITECTURES[name]
    found = meshwright.check(one.build(), one.batch())
    expected = "LEAK" if one.leaks else "CAUSAL"
    assert (found.verdict, found.leaks) == (expected, one.leaks), found.text()


@pytest.mark.parametrize("name", QUICK)
def test_architecture(name: str) -> None:
    _case(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", [n for n in ARCHITECTURES if n not in QUICK])
def test_further_architecture(name: str) -> None:
    _case(name)
