"""docs/python.md is one script, and prints what the page shows."""

from __future__ import annotations

import contextlib
import io
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from meshwright.cli import app
from tests.docs.page import read_page

PAGE = read_page(Path(__file__).parents[2] / "docs" / "python.md")


def test_the_page_prints_what_it_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])  # the folder of a factory is added to it
    monkeypatch.delitem(sys.modules, "small", raising=False)
    known: dict[str, Any] = {"__name__": "example"}
    printed = io.StringIO()
    compared = 0
    for number, block in enumerate(PAGE.blocks):
        if block.file is not None:
            Path(block.file).write_text(block.text, encoding="utf-8")
        elif block.language == "python":
            file = Path(f"block_{number}.py").resolve()
            file.write_text(block.text, encoding="utf-8")
            with contextlib.redirect_stdout(printed):
                exec(compile(block.text, str(file), "exec"), known)
        elif block.language == "console":
            _run_commands(block.text)
        elif block.language == "text":
            assert printed.getvalue() == block.text
            printed = io.StringIO()
            compared += 1
    assert not printed.getvalue() and compared == 6
    sys.modules.pop("small")  # the factory's, which the command has imported


def _run_commands(text: str) -> None:
    for line in text.splitlines():
        if line.startswith("$ meshwright compile "):  # the others start processes, which tests/cli does
            result = CliRunner().invoke(app, shlex.split(line)[2:])
            assert result.exit_code == 0, result.output
