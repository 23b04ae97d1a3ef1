"""What an earlier run has left is refused, or moved aside as a whole, never written over."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshwright.compiler.diagnostics import MeshwrightError
from meshwright.runtime.places import check_unused, move_aside


def left_in(folder: Path, what: str) -> tuple[Path, Path]:
    checkpoints, metrics = folder / "checkpoints", folder / "metrics.jsonl"
    (checkpoints / "step-00000004").mkdir(parents=True)
    (checkpoints / "step-00000004" / "meshwright.json").write_text(what)
    metrics.write_text(what)
    return checkpoints, metrics


def test_each_earlier_run_has_a_folder_of_its_own(tmp_path: Path) -> None:
    for what in ("first", "second"):
        checkpoints, metrics = left_in(tmp_path, what)
        with pytest.raises(MeshwrightError, match="E0625"):
            check_unused(checkpoints, metrics)
        move_aside(checkpoints, metrics)
        check_unused(checkpoints, metrics)
    for number, what in enumerate(("first", "second"), 1):
        there = tmp_path / f"earlier-{number}"
        assert (there / "metrics.jsonl").read_text() == what
        assert (there / "checkpoints" / "step-00000004" / "meshwright.json").read_text() == what


def test_where_nothing_was_left_nothing_is_moved(tmp_path: Path) -> None:
    move_aside(tmp_path / "checkpoints", tmp_path / "metrics.jsonl")
    assert not list(tmp_path.iterdir())
