"""Limits as they are written."""

from __future__ import annotations

import pytest

from meshwright.compiler.diagnostics import MeshwrightError
from meshwright.compiler.search.limits import token_count


@pytest.mark.parametrize(
    ("text", "count"),
    [
        (4096, 4096),
        ("131072", 1 << 17),
        ("131,072", 1 << 17),
        ("128K", 1 << 17),
        ("16M", 1 << 24),
        ("16Mi", 1 << 24),
        (" 16m ", 1 << 24),
        ("1.5G", 3 << 29),
    ],
)
def test_tokens(text: str | int, count: int) -> None:
    assert token_count(text) == count


@pytest.mark.parametrize("text", ["", "M", "a few", "16T", "-4M", "0.3K", "1e6", "4 M B", "16 tokens"])
def test_no_number_of_tokens(text: str) -> None:
    with pytest.raises(MeshwrightError) as caught:
        token_count(text)
    (told,) = caught.value.diagnostics
    assert told.code == "E0442" and told.action
