"""What a run tells: metrics as JSON lines, progress as a bar or as lines."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path

from rich.console import Console

from meshwright.runtime.metrics import Metrics, MetricsFile, read_metrics
from meshwright.runtime.progress import Bar, Lines, Silence, reporter, text_of


def told(step: int) -> Metrics:
    return Metrics(step, 3.21, 1.2, 1e-3, 12345.0, 0.5, 512 * 2**20, 2**30)


def test_metrics_are_appended_and_a_cut_line_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "metrics.jsonl"
    for step in (0, 1):  # a resumed run goes on in the same file
        with MetricsFile(path) as file:
            file.write(told(step))
    assert json.loads(path.read_text().splitlines()[1])["step"] == 1
    path.write_text(path.read_text() + '{"step": 2, "lo')
    assert read_metrics(path) == [told(0), told(1)]


def test_memory_is_that_of_the_process() -> None:
    """In a process of its own: in this one the allocator may have memory left over from other tests."""
    code = (
        "import torch; from meshwright.runtime.metrics import memory_in_use as used; cpu = torch.device('cpu');"
        "before, _ = used(cpu); held = torch.ones(2**23); after, peak = used(cpu);"
        "assert 28 * 2**20 < after - before < 64 * 2**20, after - before; assert peak >= after - 2**20"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_terminal_gets_a_bar_and_a_file_gets_lines() -> None:
    terminal = Console(file=io.StringIO(), force_terminal=True, width=140)
    file = Console(file=io.StringIO(), force_terminal=False)
    assert isinstance(reporter(0, 3, console=terminal), Bar)
    assert isinstance(reporter(0, 3, console=file), Lines)
    assert type(reporter(0, 3, rank=1, console=terminal)) is Silence
    for console in (terminal, file):
        with reporter(1, 3, console=console, every=0.0) as report:
            report.step(told(1))
            report.step(told(2))
            report.say("saved here")
        assert isinstance(console.file, io.StringIO)
        text = console.file.getvalue()
        assert "loss 3.2100" in text and "12.3k tokens/s" in text and "512 MiB" in text and "saved here" in text
        assert "3/3" in text


def test_lines_are_few_but_the_last_is_told() -> None:
    console = Console(file=io.StringIO(), force_terminal=False)
    with reporter(0, 50, console=console, every=1000.0) as report:
        for step in range(50):
            report.step(told(step))
    assert isinstance(console.file, io.StringIO)
    lines = console.file.getvalue().splitlines()
    assert [line.split()[1] for line in lines] == ["1/50", "50/50"]
    assert "left" in lines[0] and "left" not in lines[1]


def test_a_norm_that_is_not_known_is_not_told() -> None:
    assert text_of(Metrics(0, 1.0, None, None, 5e9, 1.0, 3 * 2**30, 0)) == "loss 1.0000  5G tokens/s  3.0 GiB"
