"""The published zero-bubble rows come out: how long ranks wait, and how fast schedules are against one another."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import pytest

from benchmarks import zero_bubble
from benchmarks.published.reading import OWN, read
from benchmarks.zero_bubble import Outcome, Row, apart, handing_over, outcomes, rows, simulated
from meshwright.compiler.schedules.catalogue import make
from meshwright.compiler.schedules.request import Costs, Request

ROWS = rows(read(OWN))
CELLS = list(dict.fromkeys(row.cell for row in ROWS))


@cache
def cell(which: tuple[str, int, int]) -> list[Outcome]:
    return outcomes(row for row in ROWS if row.cell == which)


def test_all_rows_are_read() -> None:
    assert len(ROWS) == 72
    assert {row.ranks for row in ROWS} == {8, 16, 32}
    assert {row.schedule for row in ROWS} == {"1F1B", "1F1B-I", "ZB-H1", "ZB-H2", "ZB-1p", "ZB-2p"}
    assert sum(row.throughput is not None for row in ROWS) == 48


BY_CELL = pytest.mark.parametrize(
    "which",
    [pytest.param(c, id=f"{c[0]}-{c[2]}", marks=pytest.mark.slow if c[2] > 100 else ()) for c in CELLS],
)
"""Those of few microbatches are quick."""


@BY_CELL
def test_bubble_rates_are_within_two_points(which: tuple[str, int, int]) -> None:
    found = cell(which)
    assert len(found) == 6
    for one in found:
        assert one.bubble == pytest.approx(one.row.bubble, abs=0.02), one.row.id
        # schedules that nobody searched for, and for which the authors' calculation is the same as ours
        if one.row.schedule in ("1F1B", "ZB-H1", "ZB-H2"):
            assert one.bubble == pytest.approx(one.row.bubble, abs=0.0001), one.row.id


@BY_CELL
def test_throughput_between_two_schedules_is_within_five_percent(which: tuple[str, int, int]) -> None:
    pairs = apart(cell(which))
    assert len(pairs) == 12
    for first, second, off in pairs:
        assert abs(off) <= 0.05, (first.id, second.id, off)


def test_only_what_leaves_a_rank_is_handed_over() -> None:
    schedule = make("zb-v", Request(2, 4, 2))
    assert schedule.placement == ((0, 1, 1, 0),)
    costs = handing_over(schedule, Costs(1.0, 2.0, 3.0, send=0.5))
    assert costs.send == 0.0
    assert costs.stages == ((1.5, 2.0, 3.0), (1.0, 2.5, 3.0), (1.5, 2.0, 3.0), (1.0, 2.5, 3.0))


def test_messages_are_handed_over_or_hide() -> None:
    # two ranks, one microbatch: two messages that everybody waits for, whoever hands them over
    row = Row("own", "own", "1F1B", 2, 1, 1, 1, (1000.0, 1000.0, 1000.0), 100.0, 1.0, 0.5, None)
    found = simulated(row)
    assert found.bubble == pytest.approx(1 - 3.0 / 6.2)
    assert found.throughput == pytest.approx(1 / 2 / 6.2)


def test_the_command_prints_what_it_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = [row for row in read(OWN) if str(row["id"]).startswith("zb-6.2b-p8-m24")]
    given, kept = tmp_path / "rows.json", tmp_path / "out.json"
    given.write_text(json.dumps(small), encoding="utf-8")
    assert zero_bubble.main(["--rows", str(given), "--json", str(kept)]) == 0
    printed = capsys.readouterr().out
    assert "GPT-6.2B        8            24  1F1B-I        8.08 %     8.27 %      1.146      1.165" in printed
    assert "bubble rate: at most 0.19 points off" in printed
    assert len(json.loads(kept.read_text(encoding="utf-8"))) == 6
    assert zero_bubble.main(["--rows", str(tmp_path / "none.json")]) == 2
