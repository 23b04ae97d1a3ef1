"""``meshwright plan``, and what compile, run and inspect do with what it says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from meshwright.compiler.plan import Precision, Recompute
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


def test_why_not_what_cannot_be(small: Path) -> None:
    """A pin that contradicts the program is an answer too, and one that cannot be read is told before the search."""
    result = invoke("plan", small, "--cluster", "h100x2", "--why-not", "tp=64", "--json")
    (other,) = json.loads(result.output)["why_not"]
    assert other["plan"] is None and other["sentences"][0].startswith("Not tp=64: ")
    assert invoke("plan", small, "--cluster", "h100x2", "--why-not", "tpp=2").output.startswith("error[E0430]")


def test_a_share_of_the_memory_is_kept_free(small: Path) -> None:
    by_share, by_size = (plan(str(small), "h100x2", reserve=free) for free in ("10%", "7.911GiB"))
    assert by_share.search.limits.reserve == pytest.approx(by_size.search.limits.reserve, rel=1e-3)
    assert by_share.search.capacity == pytest.approx(0.9 * by_share.cluster.device.memory)


def test_a_precision_in_place_of_the_sources(small: Path, tmp_path: Path) -> None:
    path = tmp_path / "plan.toml"
    assert invoke("plan", small, "--cluster", "h100x2", "--precision", "bf16", "-o", path).exit_code == 0
    assert read_plan(path).precision == Precision("bf16", "fp32", "fp32")
    assert invoke("compile", small, "--plan", path, "-o", tmp_path / "out").exit_code == 0
    as_planned = json.loads(invoke("simulate", small, "--plan", path, "--cluster", "h100x2", "--json").output)
    said = ("--precision", "bf16", "--json")
    said_again = json.loads(invoke("simulate", small, "--plan", path, "--cluster", "h100x2", *said).output)
    assert as_planned["prediction"] == said_again["prediction"]


def test_another_global_batch(small: Path) -> None:
    by_samples = plan(str(small), "h100x2", batch=32)
    by_tokens = plan(str(small), "h100x2", tokens="0.25K")
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


MLP = """\
def mlp(x[b t d]) -> [b t d]
    param U[d f], V[f d] ~ normal(0.02)
    gelu(norm(x over d) * U) * V

"""
ONCE, LAYERS = "    x = x + gelu(norm(x over d) * W1) * W2\n", "    repeat layers = 4\n        x = x + mlp(x)\n"
DEEP = SMALL.replace(ONCE, LAYERS).replace("model small", MLP + "model small")
"""The same with four layers in place of one."""


@pytest.mark.parametrize(
    ("named", "pattern"), [pytest.param("mlp", "layers.*.mlp", marks=pytest.mark.slow), ("layers", "layers.*")]
)
def test_what_the_parallel_section_recomputes(named: str, pattern: str, tmp_path: Path) -> None:
    path = tmp_path / "pinned.mw"
    path.write_text(DEEP + f"\nparallel\n    recompute {named}\n", encoding="utf-8")
    found = plan(str(path), "h100x2")
    assert found.plan.recompute == (Recompute(pattern, "nothing"),)
    assert f"Pinned: recompute {named}." in found.reasons
    assert found.prediction.compute["recomputed"] > 0, "it is priced with it"
    told = invoke("plan", path, "--cluster", "h100x2", "--pin", "selective")
    assert f"error[E0432]: the pins 'recompute {named}' and 'selective' contradict each other" in told.output
    built = invoke("compile", path, "--plan", "auto", "--cluster", "h100x2", "-o", tmp_path / "out")
    assert built.exit_code == 0, built.output
    assert read_plan(tmp_path / "out" / "plan.toml").recompute == (Recompute(pattern, "nothing"),)
    texts = [path.read_text() for path in (tmp_path / "out" / "rank").rglob("*.ir")]
    assert any("# recompute" in text for text in texts), "of one program, or of one of the stages"


def test_what_the_parallel_section_cuts(tmp_path: Path) -> None:
    """Not what the planner would: here the width of the residual stream, and nothing else."""
    path = tmp_path / "pinned.mw"
    path.write_text(DEEP + "\nparallel\n    mesh data = 2, t2 = 2\n    shard weights on data\n    shard d on t2\n")
    found = plan(str(path), "h100x4")
    assert dict(found.plan.mesh.axes) == {"data": 2, "tensor": 2}
    cut = {p.pattern: str(p.compute) for p in found.plan.parameters}
    assert cut["layers.*.mlp.U"] == "[16@tensor, 32]" and cut["E"] == "[32, 16@tensor]"
    assert "Pinned: fsdp=2; tp=2; shard d on t2." in found.reasons
    built = invoke("compile", path, "--plan", "auto", "--cluster", "h100x4", "-o", tmp_path / "out")
    assert built.exit_code == 0, built.output
    assert invoke("simulate", path, "--cluster", "h100x4").exit_code == 0


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
