"""docs/checker.md shows what its example prints, and its rule is one that is found."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path
from typing import Any

from meshwright.compiler.causality.registry import find_rule
from tests.docs.page import read_page

PAGE = read_page(Path(__file__).parents[2] / "docs" / "checker.md")


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
