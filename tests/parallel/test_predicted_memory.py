"""The peak memory of a step on real ranks is what is predicted, the library's own copies of messages included."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from benchmarks.predicted.cases import CASES, Case

ROOT = Path(__file__).parents[2]
OPTIONS = ("--memory", "--json", "--models", "llama", "--ranks")
CHOSEN = [c for c in CASES if c.model == "llama" and c.ranks in (2, 4)]


@cache
def peaks(ranks: int) -> dict[str, tuple[int, int]]:
    """By case on so many ranks: as predicted, and as the allocator saw it. Ranks are forked, so from a process of their
    own."""
    run = subprocess.run(
        [sys.executable, "-m", "benchmarks.predicted", *OPTIONS, str(ranks)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stderr
    rows = json.loads(run.stdout)["plans"]
    return {r["plan"]: (r["peak"]["predicted"], r["peak"]["measured"]) for r in rows}


@pytest.mark.parametrize(
    "case",
    [pytest.param(c, id=f"{c.ranks} ranks, {c.plan}", marks=pytest.mark.slow if c.ranks == 2 else ()) for c in CHOSEN],
)
def test_peak_memory_is_as_predicted(case: Case) -> None:
    predicted, measured = peaks(case.ranks)[case.plan]
    assert predicted == pytest.approx(measured, rel=0.02)
