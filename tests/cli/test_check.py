"""``meshwright check``: exit codes, reports, pages."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from meshwright.checking_answers import causality_of_ranks
from meshwright.checking_sarif import as_sarif
from meshwright.checking_source import read_given
from meshwright.cli import app
from meshwright.cli.waiting import told
from meshwright.compiler.causality.clock import Clock
from meshwright.compiler.diagnostics import Diagnostic, Origin

MODELS = """
import os
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

def unanswered():
    return Sums(False), ()

def exits():
    def model(ids):
        raise SystemExit(5)
    return model, ids

class Trained(Sums):
    def __init__(self, kind):
        super().__init__(False)
        self.kind, self.head = kind, nn.Linear(4, 9)

    def forward(self, ids):
        x = self.embed(ids)
        logits = self.head(x.cumsum(1))
        if self.kind == "mended" and "AHEAD" in os.environ:
            logits = logits + logits.flip(1)
        if self.kind == "exits" and torch.compiler.is_exporting():
            raise SystemExit(5)
        if self.kind == "half":
            logits = logits.bfloat16()
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten())
        if self.kind == "item":
            loss = loss * (1.0 if loss.item() < 100 else 0.5)
        if self.kind == "balance":
            share = x.softmax(-1)
            loss = loss + (share.mean((0, 1)) * share.square().mean((0, 1))).sum()
        return {"loss": loss, "logits": logits}

def trained(kind):
    model = Trained(kind)
    return model, {"ids": ids}, torch.optim.SGD(model.parameters(), lr=0.1)

def item():
    return trained("item")

def half():
    return trained("half")

def balance():
    return trained("balance")

def mended():
    return trained("mended")

def exits_when_traced():
    return trained("exits")

def as_a_dict():
    return {"model": Sums(False), "batch": ids, "steps": 10}

def whole(**more):
    model = Sums(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return {"model": model, "batch": ids, "optimizer": optimizer, "loss": lambda x, ids: x.square().mean(), **more}

def misspelt():
    return whole(precison="bf16")

def misspelt_optimizer():
    return {"model": Sums(False), "batch": ids, "optimiser": None}

def with_a_plan():
    return whole(plan="fsdp=4,numerics=safe")

def loss_alone():
    return {"model": Sums(False), "batch": ids, "loss": lambda x, ids: x.mean()}

def bad_clip():
    return whole(clip=-1)

def without_loss():
    return whole(loss=None)

def loss_fails():
    return whole(loss=lambda x, ids: 1 / 0)

def loss_decides():
    return whole(loss=lambda x, ids: x.mean() if x.mean().item() < 100 else x.sum())

def lbfgs():
    model = Sums(False)
    return model, ids, torch.optim.LBFGS(model.parameters()), lambda x, ids: x.square().mean()

def slow():
    import time
    def model(ids):
        time.sleep(0.4)
        return ids.double().cumsum(1)[..., None]
    return model, ids
"""


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, imports_forgotten: None) -> Path:
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
    assert data["source"] == "models_to_check:leaky" and causality["findings"][0]["level"] == "error"


def test_places_and_rules_of_sarif_are_those_of_a_repository(models: Path, tmp_path: Path) -> None:
    code, _, _, log = reports(models, "models_to_check:leaky")
    (result,) = log["results"]
    place = result["locations"][0]["physicalLocation"]
    assert code == 1 and place["artifactLocation"] == {"uri": "models_to_check.py", "uriBaseId": "%SRCROOT%"}
    assert log["originalUriBaseIds"] == {"%SRCROOT%": {"uri": tmp_path.as_uri() + "/"}}
    assert "\nhelp: " in result["message"]["text"]
    (rule,) = log["tool"]["driver"]["rules"]
    assert rule["id"] == "E0711" and rule["shortDescription"]["text"] == "an output sees a later token"
    assert "**What to do.**" in rule["help"]["markdown"] and "```" not in rule["help"]["markdown"]
    assert log["automationDetails"]["id"] == "meshwright check models_to_check:leaky/"


def test_a_finding_of_no_line_stands_at_the_factory(models: Path) -> None:
    _, _, _, log = reports(models, "models_to_check:without_loss")
    (result,) = log["results"]
    place = result["locations"][0]["physicalLocation"]
    line = MODELS.splitlines().index("def without_loss():") + 1
    assert result["ruleId"] == "E0252" and place["artifactLocation"]["uri"] == "models_to_check.py"
    assert place["region"] == {"startLine": line}


def test_files_elsewhere_have_their_whole_path(models: Path) -> None:
    elsewhere = Diagnostic("E0252", "no loss", Origin("", "/some where/a.py", 3))
    above = Diagnostic("E0252", "no loss", Origin("", "../a.py", 3))
    unwritten = Diagnostic("E0252", "no loss", Origin("", "<string>", 3))
    first, second, third = as_sarif([elsewhere, above, unwritten])["runs"][0]["results"]
    found = [r["locations"][0]["physicalLocation"]["artifactLocation"] for r in (first, second)]
    assert found == [{"uri": "file:///some%20where/a.py"}, {"uri": (models.parent / "a.py").as_uri()}]
    assert "locations" not in third


def reports(folder: Path, *arguments: str) -> tuple[int, str, dict[str, Any], dict[str, Any]]:
    """The exit code, the text, and both reports."""
    code, text = run(*arguments, "--json", "found.json", "--sarif", "found.sarif")
    made = [json.loads((folder / name).read_text(encoding="utf-8")) for name in ("found.json", "found.sarif")]
    return code, text, made[0], made[1]["runs"][0]


def test_a_question_without_an_answer_is_not_passed(models: Path) -> None:
    code, text, data, log = reports(models, "models_to_check:unanswered")
    assert code == 1 and "causality: UNKNOWN" in text and "drift: UNKNOWN" in text
    assert not data["passed"] and not data["causality"]["passed"] and not data["drift"]["passed"]
    assert {(r["ruleId"], r["level"]) for r in log["results"]} == {("E0715", "error"), ("E0777", "error")}
    code, text, data, log = reports(models, "models_to_check:item")
    assert code == 1 and "separability: UNKNOWN" in text and "numerics: UNKNOWN" in text
    assert text.count("error[E0254]") == 1 and "def forward(self" not in text
    assert data["causality"]["passed"] and not data["separability"]["passed"] and not data["numerics"]["passed"]


def test_a_model_that_exits_ends_no_command(models: Path) -> None:
    code, text = run("models_to_check:exits")
    assert code == 1 and text.count("it calls sys.exit(5)") == 2
    code, text = run("models_to_check:exits_when_traced")
    assert code == 1 and "SystemExit" in text and "separability: UNKNOWN" in text


@pytest.mark.parametrize(("name", "rule"), [("balance", "E0761"), ("half", "E0728")])
def test_what_fails_nothing_is_a_warning(models: Path, name: str, rule: str) -> None:
    code, text, data, log = reports(models, f"models_to_check:{name}")
    assert code == 0 and f"warning[{rule}]" in text and "error[" not in text
    assert data["passed"] and [(r["ruleId"], r["level"]) for r in log["results"]] == [(rule, "warning")]


def test_a_check_that_fails_says_so_in_its_reports(models: Path) -> None:
    for _ in range(2):  # the second time in the place of another report
        code, _, data, log = reports(models, "models_to_check:broken")
        assert code == 2 and data["passed"] is False and data["failed"][0]["code"] == "E0111"
        (invocation,) = log["invocations"]
        assert not log["results"] and invocation["executionSuccessful"] is False
        assert invocation["toolExecutionNotifications"][0]["descriptor"]["id"] == "E0111"
        run("models_to_check:good", "--json", "found.json", "--sarif", "found.sarif")


def test_reports_that_cannot_be_written_are_told_first(models: Path) -> None:
    code, text = run("models_to_check:good", "--json", "out/one", "--sarif", "out/../out/one")
    assert code == 2 and "E0901" in text and "the same file" in text and "causality" not in text
    code, text = run("models_to_check:good", "--json", "models_to_check.py/one")
    assert code == 2 and "E0718" in text and "causality" not in text
    assert not (models / "out").exists()
    code, text = run("models_to_check:good", "--json", "out/one")
    assert code == 0 and "wrote out/one, in the new folder out" in text


@pytest.mark.parametrize(
    ("source", "code", "said"),
    [
        ("", "E0710", "'' names nothing to check"),
        ("./models_to_check.py:good", "E0110", "write models_to_check:good"),
        ("a b:good", "E0710", "names nothing to check"),
    ],
)
def test_a_source_that_is_none(models: Path, source: str, code: str, said: str) -> None:
    exit_code, text = run(source)
    assert exit_code == 2 and f"error[{code}]" in text and said in text


def test_a_run_that_takes_long_is_told(capfd: pytest.CaptureFixture[str]) -> None:
    clock = Clock(60.0)
    with told("good: causality", clock, patience=0.1), clock.run("the model, on 2 rows of 12"):
        time.sleep(0.5)
    lines = capfd.readouterr().err.splitlines()
    assert lines and all("good: causality: running the model, on 2 rows of 12" in line for line in lines)
    with told("good: causality", clock, patience=0.1):
        time.sleep(0.3)  # of its own work, not of the model's
    assert not capfd.readouterr().err


def test_the_time_of_all_runs_is_bounded(models: Path) -> None:
    begun = time.monotonic()
    code, text = run("models_to_check:slow", "--seconds", "3")
    assert time.monotonic() - begun < 8, text
    assert "UNKNOWN" in text or code == 0


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
    assert [*data] == ["source", "passed", *asked] and data["source"] == build
    assert f"{build}: causality of ranks: CAUSAL on 2 ranks, CAUSAL on one device; 96 outputs read" in text
    assert "second reading: CAUSAL at length 12: position t sees the first position to t" in text


def test_an_artefact_that_leaks_where_its_source_does_not_is_told(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AHEAD", "1")
    build = str(tmp_path / "build")
    made = CliRunner().invoke(app, ["compile", "models_to_check:mended", "--plan", "ddp=2", "-o", build])
    assert made.exit_code == 0, made.output
    given = read_given(build)
    assert causality_of_ranks(given, Clock()).passed  # the source leaks too, which its own question tells
    monkeypatch.delenv("AHEAD")
    code, text = run(build)
    assert code == 1 and f"{build}: causality: CAUSAL" in text
    assert f"{build}: causality of ranks: LEAK (future) on 2 ranks, LEAK on one device" in text
    assert text.count("E0795") == 1 and "E079" not in text.replace("E0795", "")


@pytest.mark.parametrize("name", ["good", "as_a_dict"])
def test_a_model_alone_is_asked_of_what_it_sees(models: Path, name: str) -> None:
    code, text = run(f"models_to_check:{name}")
    assert code == 0 and "nothing is asked of a training step" in text


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("misspelt", "did you mean 'precision'?"),
        ("misspelt_optimizer", "did you mean 'optimizer'?"),
        ("with_a_plan", "it may return: model, batch"),
        ("loss_alone", "there is no 'optimizer'"),
        ("bad_clip", "above zero"),
    ],
)
def test_a_factory_that_means_a_step_must_be_a_whole_one(models: Path, name: str, said: str) -> None:
    code, text, data, log = reports(models, f"models_to_check:{name}")
    assert code == 2 and "error[E0112]" in text and said in text and "causality" not in text
    assert data["failed"][0]["code"] == "E0112" and log["invocations"][0]["executionSuccessful"] is False


@pytest.mark.parametrize(
    ("name", "rule"),
    [("without_loss", "E0252"), ("loss_fails", "E0258"), ("loss_decides", "E0254"), ("lbfgs", "E0253")],
)
def test_a_step_that_cannot_be_captured_is_unknown(models: Path, name: str, rule: str) -> None:
    code, text, data, log = reports(models, f"models_to_check:{name}")
    assert code == 1 and "separability: UNKNOWN" in text and "numerics: UNKNOWN" in text and f"error[{rule}]" in text
    assert not data["passed"] and data["numerics"]["headline"] == "UNKNOWN"
    assert [(r["ruleId"], r["level"]) for r in log["results"]] == [(rule, "error")]
