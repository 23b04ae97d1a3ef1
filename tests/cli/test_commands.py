"""The commands, in this process: what they print, what they write, and their exit codes."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from meshwright.build import folder_of
from meshwright.cli.settings import overrides
from meshwright.compiler.diagnostics import MeshwrightError
from meshwright.compiler.plan_file import plan_to_toml, read_plan
from meshwright.compiler.train_settings import DataSettings
from meshwright.job import RunOptions, data_settings, load_job
from tests.cli.conftest import invoke


def test_compile_says_what_it_made(small: Path, tmp_path: Path) -> None:
    result = invoke(
        "compile", small, "--plan", "fsdp=2,tp=2,micro=2", "-o", tmp_path / "out", "--set", "f=64", "--set", "batch=16"
    )
    assert result.exit_code == 0, result.output
    first, second = result.output.splitlines()
    assert first == "fsdp=2,tp=2,micro=2: 4 ranks (data=2, tensor=2), 2 microbatches of 8 samples, 2,560 parameters"
    assert second == f"written to {tmp_path / 'out'}"
    assert (tmp_path / "out" / "rank" / "micro.py").is_file()


def test_a_plan_file_compiles_to_the_same_artefact(small: Path, built: Path, tmp_path: Path) -> None:
    result = invoke("compile", small, "--plan", built / "plan.toml", "-o", tmp_path / "again", "--ranks", 2)
    assert result.exit_code == 0, result.output
    for name in ("plan.toml", "rank/micro.py", "rank/update.ir", "program/micro.ir"):
        assert (tmp_path / "again" / name).read_text() == (built / name).read_text()


def test_without_a_plan_everything_is_fully_sharded(small: Path, built: Path, tmp_path: Path) -> None:
    assert invoke("compile", small, "--ranks", 2, "-o", tmp_path / "out").exit_code == 0
    assert read_plan(tmp_path / "out" / "plan.toml").storage == read_plan(built / "plan.toml").storage


def test_the_parallel_section_is_the_plan(small: Path, tmp_path: Path) -> None:
    pinned = tmp_path / "pinned.mw"
    pins = ("mesh data = 2, tensor = 2", "shard weights on data", "shard f, vocab on tensor", "microbatches 2")
    pinned.write_text(small.read_text() + "\nparallel\n" + "".join(f"    {pin}\n" for pin in pins))
    result = invoke("compile", pinned, "-o", tmp_path / "out")
    assert result.exit_code == 0, result.output
    plan = read_plan(tmp_path / "out" / "plan.toml")
    assert plan.mesh.axes == (("data", 2), ("tensor", 2))
    assert (plan.batch, plan.microbatches) == (("data",), 2)
    assert plan.storage.parameters == plan.storage.gradients == plan.storage.state == ("data",)
    assert {p.pattern: str(p.compute) for p in plan.parameters} == {
        "E": "[32@tensor, 16]",
        "W1": "[16, 32@tensor]",
        "W2": "[32@tensor, 16]",
    }
    assert invoke("verify", tmp_path / "out", "--steps", 1).exit_code == 0


def test_the_plan_file_decides_the_precision(small: Path, built: Path, tmp_path: Path) -> None:
    from dataclasses import replace

    from meshwright.compiler.plan import Hashes, Precision

    plan = replace(read_plan(built / "plan.toml"), precision=Precision("bf16", "fp32", "fp32"), hashes=Hashes())
    (tmp_path / "plan.toml").write_text(plan_to_toml(plan))
    result = invoke("compile", small, "--plan", tmp_path / "plan.toml", "-o", tmp_path / "out")
    assert result.exit_code == 0, result.output
    assert "bf16[" in (tmp_path / "out" / "rank" / "micro.ir").read_text()


def test_the_precision_of_a_plan_may_be_edited(small: Path, built: Path, tmp_path: Path) -> None:
    text = (built / "plan.toml").read_text()
    assert "model = " in text
    plan = tmp_path / "plan.toml"
    plan.write_text(text.replace('compute = "fp32"', 'compute = "bf16"'))
    result = invoke("compile", small, "--plan", plan, "-o", tmp_path / "out")
    assert result.exit_code == 0, result.output
    assert "bf16[" in (tmp_path / "out" / "rank" / "micro.ir").read_text()
    # the plan of that artefact is as good as the first
    again = invoke("compile", small, "--plan", tmp_path / "out" / "plan.toml", "-o", tmp_path / "again")
    assert again.exit_code == 0, again.output
    assert "error[E0310]" in invoke("compile", small, "--plan", plan, "--set", "d=32", "-o", tmp_path / "d").output


def test_the_default_folder_is_named_after_the_source(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(small.parent)
    result = invoke("compile", "small.mw", "--plan", "ddp=1")
    assert result.output.endswith("written to small-build\n"), result.output
    assert folder_of("lab.gpt:make") == "gpt-build"


def test_a_factory_without_data_says_that_they_are_random(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "quiet_factory.py").write_text(
        "import torch\n\n\ndef make():\n    model = torch.nn.Linear(4, 2)\n"
        "    loss = lambda output, batch: output.sum()\n"
        "    return model, torch.ones(4, 4), torch.optim.SGD(model.parameters(), lr=0.1), loss\n"
    )
    result = invoke("compile", "quiet_factory:make", "--plan", "ddp=1", "-o", "out")
    assert result.exit_code == 0, result.output
    assert load_job(Path("out"), RunOptions()).config.notice.startswith("training on random data")


def test_inspect_shows_tables(built: Path) -> None:
    result = invoke("inspect", built)
    assert result.exit_code == 0, result.output
    for text in ("Plan: how parameters lie", "[32@data, 16]", "reduce-scatter", "Memory of a rank", "optimizer state"):
        assert text in result.output


def test_inspect_json_is_consistent(built: Path) -> None:
    result = invoke("inspect", built, "--json")
    assert result.exit_code == 0, result.output
    told = json.loads(result.output)
    assert told["plan"]["mesh"] == {"data": 2}
    assert told["parameters"]["E"]["rest"] == "[32@data, 16]"
    memory = told["memory"]
    assert memory["peak"] == sum(memory["by_kind"].values()) == max(memory["by_graph"].values())
    # E, W1, W2 in fp32, half of each
    assert memory["by_kind"]["parameters"] == (32 * 16 + 2 * 16 * 32) * 4 // 2
    gathered = [t for t in told["communication"] if t["kind"] == "all-gather" and t["graph"] == "micro"]
    assert sum(t["sent"] for t in gathered) >= (32 * 16 + 2 * 16 * 32) * 4 // 2


def test_verify_passes_and_says_so(built: Path) -> None:
    result = invoke("verify", built, "--json")
    assert result.exit_code == 0, result.output
    told = json.loads(result.output)
    assert told["passed"]
    assert set(told["gradients"]) == set(told["weights"]) == {"E", "W1", "W2"}
    assert 0 <= told["worst"] < 1e-9


def test_verify_finds_a_lost_sum(built: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from meshwright.compiler.graph import collectives

    monkeypatch.setattr(collectives, "reduce_scatter", lambda x, dim, axes: collectives.shard(x, dim, axes))
    monkeypatch.setattr(
        collectives,
        "reduce_scatter_many",
        lambda xs, dims, axes: [collectives.shard(x, d, axes) for x, d in zip(xs, dims, strict=True)],
    )
    import meshwright.verification as verification
    from meshwright.compiler.emit.artefact import read_artefact

    artefact = read_artefact(built)
    for node in artefact.rank_program.micro.module.graph.nodes:
        name = getattr(node.target, "__name__", "")
        if node.op == "call_function" and name in ("reduce_scatter", "reduce_scatter_many"):
            node.target = getattr(collectives, name)
    monkeypatch.setattr(verification, "read_artefact", lambda folder: artefact)
    result = invoke("verify", built)
    assert result.exit_code == 1
    assert "error[E0701]" in result.output


def test_set() -> None:
    assert overrides(["batch=8", " checkpoint every = 3", "lr=1e-3"]) == {"batch": 8, "checkpoint every": 3, "lr": 1e-3}
    for bad in (["a"], ["a=b"], ["=3"], ["a=1", "a=2"]):
        with pytest.raises(MeshwrightError, match="E0902"):
            overrides(bad)


def test_a_fault_of_meshwright_leaves_a_file(built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError("something is broken")

    monkeypatch.setattr("meshwright.inspection.memory", broken)
    monkeypatch.chdir(tmp_path)
    result = invoke("inspect", built)
    assert result.exit_code == 2
    assert "error[E0900]: this is a fault of Meshwright: ZeroDivisionError: something is broken" in result.output
    assert "Traceback" not in result.output
    (file,) = tmp_path.glob("meshwright-fault-*.txt")
    assert str(file) in result.output
    assert "Traceback" in file.read_text()
    assert "test_commands.py" in file.read_text()


def test_job_of_an_artefact(built: Path) -> None:
    job = load_job(built, RunOptions())
    assert job.config.steps == 4
    assert job.scalars(0) == {"0/lr": pytest.approx(0.005)}
    assert job.scalars(1) == {"0/lr": pytest.approx(0.01)}
    assert job.scalars(99) == job.scalars(3)
    spec = job.rank_program.program.parameter("E").spec
    assert torch.equal(job.weights("E", spec), load_job(built, RunOptions()).weights("E", spec))
    assert not torch.equal(job.weights("E", spec), load_job(built, RunOptions(seed=7)).weights("E", spec))
    assert job.source.rows(0)("tokens", [0, 5]).shape == (2, 8)


def test_data_on_the_command_line() -> None:
    bytes_ = DataSettings("bytes", "a.bin", "uint8", 256)
    assert data_settings(bytes_, None) == bytes_
    assert data_settings(bytes_, "b.bin") == DataSettings("bytes", "b.bin", "uint8", 256)
    assert data_settings(bytes_, "tokens:c:d.bin:uint16") == DataSettings("tokens", "c:d.bin", "uint16", 256)
    assert data_settings(bytes_, "random").kind == "random"
    assert data_settings(DataSettings(), "bytes:x").path == "x"
