"""Golden files: a graph before and after a pass. ``pytest --update-golden`` writes what the pass gives now."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.golden.passes import PASSES

FOLDER = Path(__file__).parent
_BLOCK = re.compile(r"^```(ir|python)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.md")), ids=lambda path: path.stem)
def test_golden(path: Path, update_golden: bool) -> None:
    text = path.read_text(encoding="utf-8")
    settings = dict(re.findall(r"^([a-z][a-z ]*): (.+)$", text.partition("```")[0], re.MULTILINE))
    before, after = _BLOCK.finditer(text)
    got = PASSES[settings["pass"]](before[2], settings)
    if update_golden:
        path.write_text(text[: after.start(2)] + got + text[after.end(2) :], encoding="utf-8")
    else:
        assert got == after[2]


def test_every_pass_has_a_golden_file() -> None:
    named = {re.search(r"^pass: (\w+)$", p.read_text(), re.MULTILINE)[1] for p in FOLDER.glob("*.md")}  # type: ignore[index]  # each has one
    assert named == set(PASSES)
