"""The example with a Llama of transformers runs as it says, and its loss falls."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path

import pytest

from tests.parallel.ranks import run_ranks, values

EXAMPLE = Path(__file__).parents[2] / "examples" / "hf_llama.py"
STEPS = 31


def run() -> None:
    """The example as a script, with a few steps."""
    sys.argv = [str(EXAMPLE), str(STEPS)]
    runpy.run_path(str(EXAMPLE), run_name="__main__")


def losses(printed: str) -> list[float]:
    return [
        float(loss) for loss in re.findall(r"^step +\d+  loss ([\d.]+)  gradient norm [\d.]+$", printed, re.MULTILINE)
    ]


def test_on_virtual_ranks(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.delenv("RANK", raising=False)
    run()
    told = losses(capsys.readouterr().out)
    assert len(told) == 4
    assert told[-1] < told[0] - 1.5


def test_under_a_launcher() -> None:
    outcomes = run_ranks(4, run, timeout=180)
    values(outcomes)
    told = losses(outcomes[0].output)
    assert len(told) == 4 and told[-1] < told[0] - 1.5
    assert not any(losses(o.output) for o in outcomes[1:])


def test_it_is_short() -> None:
    assert len(EXAMPLE.read_text().splitlines()) < 40
