"""What a run of a pipeline measures is compared rank by rank: ranks of different stages hold different weights."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from meshwright.build import compile
from meshwright.inspection import inspect_artefact
from meshwright.job import RunOptions, load_job
from meshwright.runtime.measured import FILE, Measured, MeasuredRank, read_measured, write_measured
from meshwright.runtime.worker import run_worker
from tests.cli.conftest import invoke
from tests.parallel.ranks import run_ranks

DEEP = """\
axes
    b: batch
    t: time = 8
    d = 16
    f = 32
    vocab = 32

def mlp(x[b t d]) -> [b t d]
    param W1[d f], W2[f d] ~ normal(0.02)
    gelu(norm(x over d) * W1) * W2

model deep(tokens: int[b t]) -> [b t vocab]
    param E[vocab d], H[d vocab] ~ normal(0.02)
    x = E[tokens]
    repeat layers = 3
        x = x + mlp(x)
    norm(x over d) * H -> [b t vocab]

train
    loss cross_entropy(deep(tokens) over vocab, next(tokens over t))
    optimizer AdamW(lr = 0.01)
    batch 8
    steps 2
    data random
"""
LESS, MORE = 1 * 32 * 16 + 1 * 2 * 16 * 32, 1 * 32 * 16 + 2 * 2 * 16 * 32
"""The elements of the two stages' weights: one of E and H, and W1 and W2 of one and two blocks."""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("measured")
    (folder / "deep.mw").write_text(DEEP, encoding="utf-8")
    compile(str(folder / "deep.mw"), "pp=2,schedule=gpipe,micro=4", output=folder / "build")
    return folder / "build"


def working(folder: str) -> None:
    sys.exit(run_worker(lambda: load_job(Path(folder), RunOptions())))


def test_kinds_are_compared_on_the_rank_that_needs_most(built: Path) -> None:
    outcomes = run_ranks(2, working, str(built), timeout=60)
    assert [o.exit_code for o in outcomes] == [0, 0], [o.output for o in outcomes]
    found = inspect_artefact(built)
    assert found.flow is not None and found.flow.fullest == 1, "else rank 0 would do"
    measured = read_measured(built / FILE)
    assert measured is not None and [(one.rank, one.pipe) for one in measured.ranks] == [(0, 0), (1, 1)]
    assert [one.memory["parameters"] for one in measured.ranks] == [4 * LESS, 4 * MORE]
    told = json.loads(invoke("inspect", built, "--json").output)
    compared = {row["what"]: (row["predicted"], row["measured"]) for row in told["compared"]}
    assert compared["parameters"] == (4 * MORE, 4 * MORE)
    assert compared["optimizer state"][0] == compared["optimizer state"][1] > 2 * 4 * MORE
    for one in measured.ranks:
        assert compared[f"memory at the peak, rank {one.pipe} of pipe"] == (found.flow.memory[one.pipe], one.peak)
    shown = " ".join(invoke("inspect", built).output.split())
    assert "kinds are those of rank 1 of pipe" in shown
    assert "for one device prologue" in shown and "one device ┃" not in shown, "no column that is empty"


def test_what_another_version_has_written_is_left_out(tmp_path: Path) -> None:
    ranks = (MeasuredRank(3, 0, 9, {"parameters": 4, "everything else": 5}), MeasuredRank(1, 1, 7, {}))
    measured = Measured(2, 0.5, 10.0, "cpu", ranks)
    write_measured(tmp_path / FILE, measured, None)
    assert read_measured(tmp_path / FILE) == measured and measured.fullest.rank == 3
    content = json.loads((tmp_path / FILE).read_text())
    del content["measured"]["ranks"]
    (tmp_path / FILE).write_text(json.dumps(content))
    assert read_measured(tmp_path / FILE) is None
