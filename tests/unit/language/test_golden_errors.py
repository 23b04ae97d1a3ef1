"""Every broken file under tests/golden/errors/language gives the error that lies next to it, word for word."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshwright.compiler.diagnostics import MeshwrightError
from meshwright.frontend.language import load_text

FOLDER = Path(__file__).parents[2] / "golden" / "errors" / "language"
FILES = sorted(FOLDER.glob("*.mw"))


def test_there_are_files() -> None:
    assert len(FILES) >= 24


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_error_is_the_golden_one(path: Path, update_golden: bool) -> None:
    with pytest.raises(MeshwrightError) as caught:
        load_text(path.read_text(), path.name)
    got = str(caught.value) + "\n"
    golden = path.with_suffix(".txt")
    if update_golden:
        golden.write_text(got)
    assert got == golden.read_text()
    for diagnostic in caught.value.diagnostics:
        assert diagnostic.code.startswith("E0"), diagnostic.code
        assert diagnostic.action, "every error says what to do"
        assert (diagnostic.place is not None and "^" in diagnostic.place.render()) or path.stem == "syntax_empty"
