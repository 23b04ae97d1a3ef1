"""``meshwright plan``, and what compile, run and inspect do with what it says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from meshwright.compiler.plan_file import read_plan
from meshwright.planning import plan
from tests.cli.conftest import SMALL, invoke
from tests.cli.test_run import meshwright


@pytest.fixture(scope="module")
def chosen(small: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plan for two ranks of this machine, as the command writes it."""
    path = tmp_path_factory.mktemp("chosen") / "made" / "plan.toml"
    result = invoke("plan", small, "--cluster", "local", "--ranks", 2, "-o", path)
    assert result.exit_code == 0, result.output
    for text in (
        "- One device: 1,536 parameters need",
        "- So: ",
        "Predicted on local",
        "Memory of a rank",
        f"written to {path}",
    ):
        assert text in result.output
    return path


def test_the_file_has_the_prediction_and_the_reasons(chosen: Path) -> None:
    found = read_plan(chosen)
    assert found.mesh.ranks == 2
    assert found.predicted is not None and found.predicted.cluster == "local"
    assert found.predicted.step_time > 0 and found.predicted.memory["parameters"] > 0
    assert found.reasons[0].startswith("One device: ")
    assert found.hashes.model and found.hashes.cluster


def test_a_run_tells_the_measured_beside_the_predicted(small: Path, chosen: Path, tmp_path: Path) -> None:
    built = tmp_path / "build"
    compiled = invoke("compile", small, "--plan", chosen, "-o", built)
    assert compiled.exit_code == 0, compiled.output
    assert read_plan(built / "plan.toml").predicted == read_plan(chosen).predicted
    ran = meshwright("run", built)
    assert ran.returncode == 0, ran.stderr
    told = json.loads((built / "measured.json").read_text())
    assert told["predicted"]["step_time"] == read_plan(chosen).predicted.step_time  # type: ignore[union-attr]  # it has one
    measured = told["measured"]
    assert measured["steps"] == 3 and measured["step_time"] > 0 and measured["device"] == "cpu"
    # E[32 16], W1[16 32], W2[32 16] in fp32, twice that for AdamW's moments and a counter each: alike on both sides
    shown = json.loads(invoke("inspect", built, "--json").output)
    compared = {row["what"]: row for row in shown["compared"]}
    for kind in ("parameters", "optimizer state"):
        assert compared[kind]["predicted"] == compared[kind]["measured"], kind
    assert {"step time", "everything else", "memory at the peak"} <= compared.keys()
    assert "Predicted and measured" in invoke("inspect", built).output


def test_pins_and_why_not(small: Path) -> None:
    result = invoke("plan", small, "--cluster", "h100x4", "--pin", "fsdp=4", "--why-not", "ddp", "--json")
    assert result.exit_code == 0, result.output
    told = json.loads(result.output)
    assert told["plan"]["mesh"] == {"data": 4} and told["plan"]["storage"]["parameters"] == ["data"]
    (other,) = told["why_not"]
    assert other["plan"]["plan"].startswith("ddp=4") and other["seconds_by_cause"]
    assert told["candidates"] and told["considered"] >= len(told["candidates"])


def test_another_global_batch(small: Path) -> None:
    by_samples = plan(str(small), "h100x2", batch=32)
    by_tokens = plan(str(small), "h100x2", tokens=256)
    assert by_samples.search.facts.batch == by_tokens.search.facts.batch == 32
    assert by_samples.search.facts.tokens == 256
    assert by_samples.candidate == by_tokens.candidate
    assert by_samples.plan.hashes == by_tokens.plan.hashes


def test_a_plan_for_another_batch_compiles_with_it(small: Path, tmp_path: Path) -> None:
    path = tmp_path / "plan.toml"
    assert invoke("plan", small, "--cluster", "h100x2", "--batch", 16, "-o", path).exit_code == 0
    refused = meshwright("compile", small, "--plan", path, "-o", tmp_path / "out")
    assert "error[E0310]" in refused.stderr
    assert invoke("compile", small, "--plan", path, "--batch", 16, "-o", tmp_path / "out").exit_code == 0


def test_the_parallel_section_pins(tmp_path: Path) -> None:
    path = tmp_path / "pinned.mw"
    path.write_text(
        SMALL + "\nparallel\n    mesh data = 4\n    shard weights on data\n    microbatches 2\n", encoding="utf-8"
    )
    found = plan(str(path), "h100x4")
    assert dict(found.plan.mesh.axes) == {"data": 4}
    assert found.plan.microbatches == 2 and found.plan.storage.parameters == ("data",)
    told = meshwright("plan", path, "--cluster", "h100x4", "--pin", "micro=1")
    assert "error[E0432]" in told.stderr


def test_the_parallel_section_is_told_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "pinned.mw"
    path.write_text(SMALL + "\nparallel\n    mesh data = 3\n    shard weights on data\n", encoding="utf-8")
    told = meshwright("plan", path, "--cluster", "h100x4")
    assert "error[E0433]: 4 ranks cannot be divided by fsdp=3" in told.stderr
    assert f"{path}:25:" in told.stderr


def test_compile_with_the_planners_choice(small: Path, tmp_path: Path) -> None:
    result = invoke("compile", small, "--plan", "auto", "--cluster", "h100x4", "-o", tmp_path / "out")
    assert result.exit_code == 0, result.output
    found = read_plan(tmp_path / "out" / "plan.toml")
    assert found.mesh.ranks == 4 and found.predicted is not None and found.predicted.cluster == "h100x4"
    assert found.reasons


def test_a_cluster_needs_the_planner(small: Path, tmp_path: Path) -> None:
    told = meshwright("compile", small, "--plan", "fsdp=2", "--cluster", "h100x2", "-o", tmp_path / "out")
    assert told.returncode == 2 and "--plan auto" in told.stderr
