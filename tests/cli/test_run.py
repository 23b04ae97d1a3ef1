"""``meshwright run`` with real processes: trains, saves, resumes, and tells when it cannot."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path


def meshwright(*arguments: object, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "meshwright.cli", *map(str, arguments)]
    return subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1", **variables}, timeout=300
    )


def losses(file: Path) -> list[tuple[int, float]]:
    return [(line["step"], line["loss"]) for line in map(json.loads, file.read_text().splitlines())]


def test_a_run_that_is_resumed_goes_on_as_if_it_had_not_stopped(built: Path, tmp_path: Path) -> None:
    places = ("--checkpoints", tmp_path / "checkpoints", "--metrics", tmp_path / "metrics.jsonl")
    whole = meshwright("run", built, "--ranks", 2, "--checkpoints", tmp_path / "w", "--metrics", tmp_path / "w.jsonl")
    assert whole.returncode == 0, whole.stderr
    assert "step 4/4" in whole.stdout
    first = meshwright("run", built, "--steps", 2, *places)
    assert first.returncode == 0, first.stderr
    second = meshwright("run", built, "--resume", *places)
    assert second.returncode == 0, second.stderr
    assert "resumed after step 2" in second.stdout
    assert losses(tmp_path / "metrics.jsonl") == losses(tmp_path / "w.jsonl")
    assert [step for step, _ in losses(tmp_path / "w.jsonl")] == [0, 1, 2, 3]


def test_a_fault_is_told_once_without_traceback(built: Path, tmp_path: Path) -> None:
    failed = meshwright("run", built, "--resume", "--checkpoints", tmp_path / "none")
    assert failed.returncode == 1
    assert failed.stderr.count("error[E06") == 1
    assert "Traceback" not in failed.stderr + failed.stdout


def test_as_one_of_too_many_ranks(built: Path) -> None:
    failed = meshwright("run", built, RANK="0", WORLD_SIZE="3", MASTER_ADDR="127.0.0.1", MASTER_PORT="1")
    assert failed.returncode == 1
    assert "error[E0601]" in failed.stderr
