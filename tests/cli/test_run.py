"""``meshwright run`` with real processes: trains, saves, resumes, and tells when it cannot."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from meshwright.compiler.train_settings import DataSettings
from meshwright.job import described


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


@pytest.mark.slow
def test_what_a_run_leaves_is_not_mixed_with_another(small: Path, tmp_path: Path) -> None:
    folder, corpus = tmp_path / "small", tmp_path / "corpus.bin"
    corpus.write_bytes(bytes(range(32)) * 40)
    assert meshwright("compile", small, "--plan", "ddp=1", "-o", folder).returncode == 0
    first = meshwright("run", folder, "--checkpoint-every", 1, "--keep", 2, "--data", f"bytes:{corpus}")
    assert first.returncode == 0, first.stderr
    kept = {p.name for p in (folder / "checkpoints").glob("step-*")}
    assert kept == {"step-00000003", "step-00000004"}

    assert "error[E0625]" in meshwright("run", folder).stderr
    assert "error[E0626]" in meshwright("run", folder, "--resume", "--steps", 5).stderr
    on = meshwright("run", folder, "--resume", "--data", f"bytes:{corpus}")
    assert on.returncode == 0, on.stderr
    assert "all 4 steps are done; give --steps to go on" in on.stdout

    fresh = meshwright("run", folder, "--fresh", "--steps", 1)
    assert fresh.returncode == 0, fresh.stderr
    assert {p.name for p in (folder / "checkpoints").glob("step-*")} == {"step-00000001"}
    assert [step for step, _ in losses(folder / "metrics.jsonl")] == [0]
    assert {p.name for p in (folder / "earlier-1" / "checkpoints").glob("step-*")} == kept
    assert [step for step, _ in losses(folder / "earlier-1" / "metrics.jsonl")] == [0, 1, 2, 3]


def test_other_data_of_the_same_name_and_size_are_seen(tmp_path: Path) -> None:
    one, other = tmp_path / "1" / "corpus.bin", tmp_path / "2" / "corpus.bin"
    for file, value in ((one, b"a"), (other, b"b")):
        file.parent.mkdir()
        file.write_bytes(value * 100)
    settings = [DataSettings("bytes", str(file)) for file in (one, other)]
    assert described(settings[0]).startswith("bytes:corpus.bin, 100 bytes")
    assert described(settings[0]) != described(settings[1])
    other.write_bytes(one.read_bytes())
    assert described(settings[0]) == described(settings[1])
    assert described(DataSettings()) == "random data"
