"""``meshwright simulate``: for artefacts and for sources, on clusters that are not there."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
import torch

from meshwright.compiler.diagnostics import MeshwrightError
from tests.cli.conftest import invoke
from tests.models import EXAMPLES


def test_an_artefact_on_a_cluster_that_is_not_there(built: Path) -> None:
    result = invoke("simulate", built, "--cluster", "h100x2")
    assert result.exit_code == 0, result.output
    lines = result.output.splitlines()
    assert lines[0].endswith("small.mw on h100x2")
    assert lines[1] == "fsdp=2: 2 ranks (data=2), 1 microbatch of 8 samples, 1,536 parameters"
    pattern = r"step [\d.]+ \w+, [\d,]+ tokens/s, \d+\.\d% of the peak; it fits: [\d.]+ GiB of [\d.]+ GiB"
    assert re.fullmatch(pattern, lines[2])
    for title in ("Time of a step", "Communication", "Memory of a rank; the peak is in "):
        assert any(line.startswith(title) for line in lines), result.output


@pytest.mark.parametrize("text", ["fsdp=2", "fsdp=2,tp=2,sp,prefetch"])
def test_an_artefact_is_predicted_as_its_source_is(text: str, tmp_path: Path) -> None:
    source, ranks = EXAMPLES / "gpt.mw", 2 if text == "fsdp=2" else 4
    built = invoke("compile", source, "--plan", text, "--set", "layers=2", "-o", tmp_path / "out")
    assert built.exit_code == 0, built.output
    given = ("--cluster", f"h100x{ranks}", "--json")
    from_source = invoke("simulate", source, "--plan", text, "--set", "layers=2", *given)
    from_artefact = invoke("simulate", tmp_path / "out", *given)
    assert from_artefact.exit_code == 0, from_artefact.output
    found, wanted = (json.loads(r.output)["prediction"] for r in (from_artefact, from_source))
    assert found["memory"]["by_kind"] == wanted["memory"]["by_kind"]
    assert found["seconds"] == pytest.approx(wanted["seconds"], rel=1e-3)


def test_the_parts_of_the_json_add_up(small: Path) -> None:
    arguments = ("--plan", "fsdp=4,tp=2,sp,micro=2", "--cluster", "h100x8", "--json", "--fusion", "compiled")
    result = invoke("simulate", small, *arguments)
    assert result.exit_code == 0, result.output
    found = json.loads(result.output)
    assert found["cluster"] == {"name": "h100x8", "device": "h100", "ranks": 8}
    assert found["plan"] == {
        "name": "fsdp=4,tp=2,sp,micro=2",
        "mesh": {"data": 4, "tensor": 2},
        "ranks": 8,
        "microbatches": 2,
    }
    assert found["fusion"] == "compiled"
    prediction = found["prediction"]
    parts = sum(sum(prediction[group].values()) for group in ("compute", "exposed", "other"))
    assert parts == pytest.approx(prediction["seconds"])
    assert set(prediction["communication"]) == {"data", "tensor", "data,tensor"}
    assert sum(prediction["memory"]["by_kind"].values()) == prediction["memory"]["peak"]
    assert prediction["tokens_per_second"] == pytest.approx(64 / prediction["seconds"])


def test_fused_kernels_take_less_time(small: Path) -> None:
    times = []
    for fusion in ("none", "kernels", "compiled"):
        result = invoke("simulate", small, "--plan", "ddp=8", "--cluster", "h100x8", "--json", "--fusion", fusion)
        times.append(json.loads(result.output)["prediction"]["seconds"])
    assert times == sorted(times, reverse=True)
    assert times[0] > times[2]


def test_the_planners_choice_is_for_the_cluster_that_is_named(small: Path) -> None:
    result = invoke("simulate", small, "--plan", "auto", "--cluster", "h100x4", "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.output)
    assert found["plan"]["ranks"] == 4 and found["cluster"]["name"] == "h100x4"


def test_without_a_plan_and_a_cluster_this_machine_is_filled(small: Path) -> None:
    result = invoke("simulate", small, "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.output)
    assert found["cluster"]["name"] == "local" and found["plan"]["ranks"] == found["cluster"]["ranks"]


def test_another_global_batch(small: Path) -> None:
    given = ("simulate", small, "--plan", "fsdp=2", "--cluster", "h100x2", "--json")
    rates = [json.loads(invoke(*given, *more).output)["prediction"] for more in ((), ("--batch", 64))]
    assert [p["tokens_per_second"] * p["seconds"] for p in rates] == pytest.approx([64, 512])


def test_without_a_plan_the_cluster_is_filled(small: Path) -> None:
    result = invoke("simulate", small, "--cluster", "h100x8", "--json")
    assert json.loads(result.output)["plan"]["mesh"] == {"data": 8}
    result = invoke("simulate", small, "--plan", "fsdp,tp=2", "--cluster", "h100x8", "--json")
    assert json.loads(result.output)["plan"]["mesh"] == {"data": 4, "tensor": 2}


def test_local_has_as_many_ranks_as_the_plan(built: Path) -> None:
    result = invoke("simulate", built, "--json")
    assert json.loads(result.output)["cluster"]["ranks"] == 2


def test_the_timeline_is_written(built: Path, tmp_path: Path) -> None:
    path = tmp_path / "timeline.json"
    result = invoke("simulate", built, "--cluster", "h100x2", "--trace", path)
    assert result.exit_code == 0, result.output
    assert result.output.splitlines()[-1].startswith("the timeline is written to ")
    events = json.loads(path.read_text())["traceEvents"]
    assert {"X", "C", "M"} == {e["ph"] for e in events}


def test_another_batch_is_another_step(small: Path) -> None:
    result = invoke("simulate", small, "--plan", "fsdp=8", "--cluster", "h100x8", "--json", "--set", "batch=64")
    prediction = json.loads(result.output)["prediction"]
    assert prediction["tokens_per_second"] == pytest.approx(512 / prediction["seconds"])


@pytest.mark.parametrize(
    ("arguments", "code", "action"),
    [
        (
            ("--plan", "fsdp=2", "--cluster", "h100x8"),
            "E0470",
            "give --cluster h100x2, or a plan whose axes multiply to 8",
        ),
        (("--plan", "fsdp=2,tp=6", "--cluster", "h100x8"), "E0470", "give a cluster file with 12 devices"),
        (("--cluster", "h100x8", "--fusion", "compile"), "E0471", "did you mean 'compiled'?"),
        (("--plan", "fsdp=16", "--cluster", "h100x16"), "E0302", "use a global batch of at least 16"),
    ],
)
def test_what_does_not_fit_is_told(small: Path, arguments: tuple[str, ...], code: str, action: str) -> None:
    result = invoke("simulate", small, *arguments)
    assert isinstance(result.exception, MeshwrightError) or result.exit_code == 1, result.output
    told = f"{result.output}{result.stderr}"
    assert f"error[{code}]" in told
    assert action in " ".join(told.split())


FACTORY = """\
import torch
from torch import nn

def make(width=1 << 20):
    model = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1))
    batch = (torch.zeros(64, width), torch.zeros(64, 1))
    loss = lambda output, batch: ((output - batch[1]) ** 2).mean()
    return model, batch, torch.optim.AdamW(model.parameters()), loss
"""


def test_no_weights_are_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, imports_forgotten: None) -> None:
    (tmp_path / "wide.py").write_text(FACTORY, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    # 1 TiB of weights, 4 TiB with optimizer state: no machine would hold them
    result = invoke(
        "simulate", "wide:make", "--plan", "fsdp=64", "--cluster", "h100x64", "--json", "--set", "width=524288"
    )
    assert result.exit_code == 0, result.output
    prediction = json.loads(result.output)["prediction"]
    assert prediction["memory"]["by_kind"]["parameters"] == pytest.approx(4 * 524288**2 / 64, rel=1e-3)
    assert not prediction["fits"]
    assert torch.tensor(0).device.type == "cpu"
