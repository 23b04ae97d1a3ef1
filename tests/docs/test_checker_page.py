"""docs/checker.md shows what its example prints, and its rule is one that is found."""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import re
import shlex
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from meshwright.cli import app
from meshwright.compiler.causality.registry import find_rule
from tests.docs.page import read_page

ROOT = Path(__file__).parents[2]
PAGE = read_page(ROOT / "docs" / "checker.md")


def test_the_commands_print_what_the_page_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, update_golden: bool
) -> None:
    shutil.copy(ROOT / "examples" / "gpt.mw", tmp_path)
    monkeypatch.chdir(tmp_path)
    shown = next(b.text for b in PAGE.blocks if b.language == "console")
    lines = []
    for line in shown.splitlines():
        if line.startswith("$ meshwright "):
            result = CliRunner().invoke(app, shlex.split(line)[2:])
            assert result.exit_code == 0, result.output
            lines += [line, *(result.output.splitlines() if " check " in line else ())]
    text = "\n".join(lines) + "\n"
    if update_golden:
        PAGE.path.write_text(PAGE.path.read_text(encoding="utf-8").replace(shown, text), encoding="utf-8")
    else:
        assert _alike(text) == _alike(shown)


def _alike(text: str) -> str:
    """What rounding and the speed of a machine say is left out."""
    return re.sub(r"\d+ pairs of runs", "pairs of runs", re.sub(r"\d\.\de-\d+", "rounding", text))


def test_the_example_prints_what_the_page_shows() -> None:
    first, *_ = [b for b in PAGE.blocks if b.language == "python"]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(first.text, "example.py", "exec"), {"__name__": "example"})
    assert printed.getvalue() == PAGE.shown


def test_the_rule_is_found() -> None:
    *_, last = [b for b in PAGE.blocks if b.language == "python"]
    known: dict[str, Any] = {"__name__": "example"}
    exec(compile(last.text, "rule.py", "exec"), known)
    assert find_rule("mylib.normalise_rows.default") is known["normalise_rows"]


def test_the_job_runs_as_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, imports_forgotten: None
) -> None:
    """Its command writes the report that its next step uploads, also where the source cannot be read."""
    (job,) = [b.text for b in PAGE.blocks if b.language == "yaml"]
    (line,) = re.findall(r"- run: meshwright (check .*)", job)
    (uploaded,) = re.findall(r"sarif_file: (\S+)}", job)
    (tmp_path / "package").mkdir()
    module = tmp_path / "package" / "module.py"
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    text = "import torch\ndef factory():\n    return torch.nn.Embedding(9, 4), torch.zeros(2, 8, dtype=torch.long){}\n"
    for more, code in (("", 0), (", None, 3", 2)):
        module.write_text(text.format(more), encoding="utf-8")
        for name in ("package.module", "package"):
            sys.modules.pop(name, None)
        importlib.invalidate_caches()
        (tmp_path / uploaded).unlink(missing_ok=True)
        result = CliRunner().invoke(app, shlex.split(line))
        assert result.exit_code == code, result.output
        log = json.loads((tmp_path / uploaded).read_text(encoding="utf-8"))
        assert log["runs"][0]["invocations"][0]["executionSuccessful"] == (code == 0)
        assert ("causality: CAUSAL" in result.stdout) == (code == 0)
        assert ("error[E0112]" in result.stderr) == (code == 2)
