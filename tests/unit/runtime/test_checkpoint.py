"""Checkpoints of virtual clusters: any mesh loads what any other wrote; broken ones are told."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from meshwright.compiler.diagnostics import MeshwrightError
from meshwright.compiler.mesh import Mesh
from meshwright.runtime import checkpoint
from meshwright.runtime.checkpoint_folder import complete_in, find
from meshwright.runtime.checkpoint_planner import Shards
from meshwright.runtime.virtual import VirtualCluster
from tests.unit.runtime import toy

FOUR = Mesh((("data", 2), ("tensor", 2)))


def shards_of(cluster: VirtualCluster) -> Shards:
    everyone = [cluster.mesh.coordinates(r) for r in range(cluster.mesh.ranks)]
    return Shards(cluster.rank_program, list(zip(everyone, cluster.holdings, strict=True)))


def trained(mesh: Mesh, variant: str, steps: int = 2) -> VirtualCluster:
    cluster = VirtualCluster(toy.program(mesh, variant), toy.weights)
    for step in range(steps):
        cluster.step(toy.batch(step))
    return cluster


@pytest.mark.parametrize("to", [Mesh((("data", 1),)), Mesh((("data", 3), ("tensor", 2))), FOUR], ids=str)
@pytest.mark.parametrize("variant", ["ddp", "fsdp"])
def test_another_mesh_and_plan_loads_it(to: Mesh, variant: str, tmp_path: Path) -> None:
    source = trained(FOUR, "fsdp")
    place = checkpoint.save(shards_of(source), tmp_path, step=2, seed=5)
    assert place.name == "step-00000002"
    target = VirtualCluster(toy.program(to, variant), toy.weights)
    record = checkpoint.load(shards_of(target), tmp_path)
    assert (record.step, record.seed) == (2, 5)
    assert torch.equal(source.full_parameters()["w"], target.full_parameters()["w"])
    assert torch.equal(source.full_state()["w/momentum"], target.full_state()["w/momentum"])
    assert target.full_buffers()["seen"] == 2


def test_a_resumed_run_goes_on_bit_for_bit(tmp_path: Path) -> None:
    straight = trained(FOUR, "fsdp", 5)
    checkpoint.save(shards_of(trained(FOUR, "fsdp", 2)), tmp_path, step=2, seed=0)
    resumed = VirtualCluster(toy.program(FOUR, "fsdp"), toy.weights)
    checkpoint.load(shards_of(resumed), tmp_path)
    for step in range(2, 5):
        resumed.step(toy.batch(step))
    assert torch.equal(straight.full_parameters()["w"], resumed.full_parameters()["w"])


def test_the_last_few_are_kept_and_the_latest_is_found(tmp_path: Path) -> None:
    shards = shards_of(trained(FOUR, "ddp", 0))
    for step in (1, 2, 3, 10):
        checkpoint.save(shards, tmp_path, step=step, seed=0, keep=2)
    assert [p.name for p in complete_in(tmp_path)] == ["step-00000003", "step-00000010"]
    assert find(tmp_path).name == "step-00000010"
    assert not list(tmp_path.glob("*.partial"))


def test_a_crash_while_writing_leaves_the_older_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shards = shards_of(trained(FOUR, "ddp", 0))
    checkpoint.save(shards, tmp_path, step=1, seed=0)

    def crash(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(checkpoint, "commit", crash)
    with pytest.raises(KeyboardInterrupt):
        checkpoint.save(shards, tmp_path, step=2, seed=0)
    monkeypatch.undo()
    assert checkpoint.load(shards, tmp_path).step == 1
    assert checkpoint.save(shards, tmp_path, step=2, seed=0).name == "step-00000002"  # what was left is no hindrance
    assert checkpoint.load(shards, tmp_path).step == 2


def test_saving_a_step_again_replaces_it(tmp_path: Path) -> None:
    cluster = trained(FOUR, "ddp", 1)
    checkpoint.save(shards_of(cluster), tmp_path, step=1, seed=0)
    cluster.step(toy.batch(1))
    checkpoint.save(shards_of(cluster), tmp_path, step=1, seed=0)
    other = trained(FOUR, "ddp", 0)
    checkpoint.load(shards_of(other), tmp_path)
    assert torch.equal(cluster.full_parameters()["w"], other.full_parameters()["w"])


def test_broken_checkpoints_are_told(tmp_path: Path) -> None:
    shards = shards_of(trained(FOUR, "fsdp", 1))
    with pytest.raises(MeshwrightError, match="E0620"):
        checkpoint.load(shards, tmp_path)
    place = checkpoint.save(shards, tmp_path, step=1, seed=0)
    file = next(place.glob("*.distcp"))
    content = file.read_bytes()
    file.write_bytes(content[:-7])
    with pytest.raises(MeshwrightError, match=r"E0621.*has \d+ bytes of \d+"):
        checkpoint.load(shards, tmp_path)
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(MeshwrightError, match=r"E0621.*has been changed"):
        checkpoint.load(shards, tmp_path)
    file.unlink()
    with pytest.raises(MeshwrightError, match=r"E0621.*lacks its file"):
        checkpoint.load(shards, tmp_path)
    file.write_bytes(content)
    (place / ".metadata").write_bytes(b"nonsense")
    with pytest.raises(MeshwrightError, match=r"E0621.*is broken"):
        checkpoint.load(shards, tmp_path)
    (place / "meshwright.json").write_text("{")
    with pytest.raises(MeshwrightError, match=r"E0621.*cannot be read"):
        checkpoint.load(shards, place)
    (place / "meshwright.json").write_text(json.dumps({"step": 1, "seed": 0, "format": 99, "files": {}}))
    with pytest.raises(MeshwrightError, match=r"E0622.*format 99"):
        checkpoint.load(shards, place)


def test_a_checkpoint_of_another_model_is_told(tmp_path: Path) -> None:
    cluster = trained(FOUR, "fsdp", 1)
    checkpoint.save(shards_of(cluster), tmp_path, step=1, seed=0)
    program = cluster.rank_program.program
    state = dict(program.state)
    program.state["w/exp_avg"] = cluster.rank_program.program.state["w/momentum"]
    cluster.rank_program.state["w/exp_avg"] = cluster.rank_program.state["w/momentum"]
    with pytest.raises(MeshwrightError, match=r"E0622.*no optimizer state 'w/exp_avg'"):
        checkpoint.load(shards_of(cluster), tmp_path)
    assert checkpoint.load(shards_of(cluster), tmp_path, state=False).step == 1
    program.state = state
    checkpoint.load(shards_of(cluster), tmp_path)


def test_a_folder_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(MeshwrightError, match="E0623"):
        checkpoint.save(shards_of(trained(FOUR, "fsdp", 0)), tmp_path / "file", step=1, seed=0)
