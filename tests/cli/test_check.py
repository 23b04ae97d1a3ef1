"""``meshwright check``: exit codes, reports, pages."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from meshwright.cli import app

MODELS = """
import torch
from torch import nn

ids = torch.randint(9, (2, 12), generator=torch.Generator().manual_seed(0))

class Sums(nn.Module):
    def __init__(self, flip):
        super().__init__()
        self.embed, self.flip = nn.Embedding(9, 4), flip

    def forward(self, ids):
        x = self.embed(ids)
        return x.flip(1).cumsum(1) if self.flip else x.cumsum(1)

def good():
    return Sums(False), ids

def leaky():
    return Sums(True), {"ids": ids}

def packed():
    seg = torch.arange(12).expand(2, 12) // 4
    return {"model": lambda ids, seg: ids.double().cumsum(1)[..., None], "batch": (ids, seg)}

def broken():
    raise ValueError("no")

def empty():
    return None
"""


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "models_to_check.py").write_text(MODELS, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def run(*arguments: str) -> tuple[int, str]:
    found = CliRunner().invoke(app, ["check", *arguments])
    return found.exit_code, found.output


def test_causal_is_zero_and_a_leak_is_one(models: Path) -> None:
    code, text = run("models_to_check:good")
    assert code == 0 and "models_to_check:good: causality: CAUSAL" in text
    code, text = run("models_to_check:leaky")
    assert code == 1 and "LEAK (future)" in text and "E0711" in text and "models_to_check.py:" in text.replace("\n", "")


def test_segments_are_named(models: Path) -> None:
    code, text = run("models_to_check:packed")
    assert code == 0
    code, text = run("models_to_check:packed", "--segments", "seg")
    assert code == 1 and "LEAK (document)" in text


@pytest.mark.parametrize("source", ["models_to_check:broken", "models_to_check:empty", "none:x", "gpt", "none.mw"])
def test_bad_input_is_two(models: Path, source: str) -> None:
    code, text = run(source)
    assert code == 2 and "error[E" in text and "Traceback" not in text


def test_reports_are_written(models: Path) -> None:
    code, _ = run("models_to_check:leaky", "--json", "out/found.json", "--sarif", "out/found.sarif")
    assert code == 1
    data = json.loads((models / "out" / "found.json").read_text(encoding="utf-8"))
    causality = data["causality"]
    assert not data["passed"] and causality["leaks"] == ["future"] and causality["witnesses"][0]["kind"] == "future"
    log = json.loads((models / "out" / "found.sarif").read_text(encoding="utf-8"))
    assert log["version"] == "2.1.0" and log["runs"][0]["results"][0]["ruleId"] == "E0711"


def test_a_file_of_the_language_knows_its_dims() -> None:
    code, text = run("examples/gpt.mw", "--set", "layers=1", "--set", "d=16", "--set", "t=12")
    assert code == 0 and "examples/gpt.mw: causality: CAUSAL" in text


def test_pages_are_printed() -> None:
    code, text = run("--explain", "e0711")
    assert code == 0 and text.startswith("# E0711: ")
    code, text = run("--explain", "E9999")
    assert code == 2 and "E0717" in text


def test_an_artefact_is_asked_everything(tmp_path: Path) -> None:
    size = ["--set", "layers=1", "--set", "d=16", "--set", "t=12", "--set", "batch=8"]
    build = str(tmp_path / "build")
    made = CliRunner().invoke(app, ["compile", "examples/gpt.mw", "--plan", "ddp=2,micro=2", "-o", build, *size])
    assert made.exit_code == 0, made.output
    report = tmp_path / "found.json"
    code, text = run(build, "--json", str(report))
    data = json.loads(report.read_text(encoding="utf-8"))
    assert code == 0 and data["passed"], text
    asked = ["causality", "drift", "separability", "numerics", "causality of ranks", "equivalence", "deadlock"]
    assert [*data] == ["passed", *asked]
    assert f"{build}: causality of ranks: CAUSAL on 2 ranks, CAUSAL on one device; 96 outputs read" in text
    assert "second reading: CAUSAL at length 12: position t sees the first position to t" in text


def test_a_model_alone_is_asked_of_what_it_sees(models: Path) -> None:
    code, text = run("models_to_check:good")
    assert code == 0 and "nothing is asked of a training step" in text
