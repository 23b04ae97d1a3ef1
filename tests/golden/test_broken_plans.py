"""Broken plans, artefacts and commands: what a user is told, to the letter. ``pytest --update-golden`` writes anew.

Every case runs in a folder of its own that holds ``small.mw`` and ``build``, that file compiled for ``fsdp=2``.
"""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

import pytest

from meshwright.build import compile
from tests.docs.page import printed, read_page

CASES = sorted((Path(__file__).parent / "errors" / "plans").glob("*.md"))
SMALL = """\
axes
    b: batch
    t: time = 8
    d = 16
    vocab = 32

model small(tokens: int[b t]) -> [b t vocab]
    param E[vocab d] ~ normal(0.02)
    norm(E[tokens] over d) * E -> [b t vocab]

train
    loss cross_entropy(small(tokens) over vocab, next(tokens over t))
    optimizer SGD(lr = 0.1)
    batch 8
    steps 4
    data random
"""


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("prepared")
    (folder / "small.mw").write_text(SMALL, encoding="utf-8")
    compile(str(folder / "small.mw"), "fsdp=2", output=folder / "build")
    return folder


@pytest.mark.usefixtures("imports_forgotten")
@pytest.mark.parametrize("path", CASES, ids=lambda path: path.stem)
def test_a_broken_input_is_told(
    path: Path,
    prepared: Path,
    tmp_path: Path,
    update_golden: bool,
    monkeypatch: pytest.MonkeyPatch,
    imports_forgotten: None,
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])  # a factory's folder is added to it
    shutil.copytree(prepared, tmp_path, dirs_exist_ok=True)
    page = read_page(path)
    got = printed(page, tmp_path).replace(str(tmp_path), "FOLDER")
    assert re.search(r"error\[E0\d{3}\]", got), got
    assert "E0900" not in got, got
    assert "Traceback" not in got
    if update_golden:
        path.write_text(page.with_shown(got), encoding="utf-8")
    else:
        assert got == page.shown


def test_there_are_enough_of_them() -> None:
    assert len(CASES) >= 40
