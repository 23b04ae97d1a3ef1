"""Pipelines on real gloo ranks, through artefacts that are written and read: as on one device, and checkpoints go from
any plan to any other."""

from __future__ import annotations

import copy
import math
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from meshwright.compiler.graph.program import TensorSpec
from meshwright.runtime import checkpoint
from meshwright.runtime.checkpoint_folder import find
from meshwright.runtime.checkpoint_planner import Shards
from meshwright.runtime.materialize import from_module
from meshwright.runtime.virtual import VirtualCluster
from tests.models import Variant
from tests.parity.harness import SEED, Cell, Task, captured, compare, compiled, examples, truth
from tests.parity.on_processes import measure_on_processes
from tests.parity.pipeline_cells import ON_FOUR_PROCESSES, ON_PROCESSES, pipeline_cell

TOLERANCE = 1e-9
TASK = Task("gpt.mw", Variant(layers=4, dropout=0.1))
"""Its head is its embedding."""


@pytest.mark.parametrize(
    "which",
    [ON_FOUR_PROCESSES, pytest.param(ON_PROCESSES[0], marks=pytest.mark.slow)],
    ids=lambda which: ", ".join(map(str, which)),
)
def test_agrees_with_one_device(which: tuple[str, str, int, str], tmp_path: Path) -> None:
    found = measure_on_processes(pipeline_cell(*which), tmp_path / "build")
    assert found.worst < TOLERANCE, found


def cell(plan: str) -> Cell:
    return Cell(TASK, plan, 4, 2)


def cluster(plan: str, *, trained: bool) -> VirtualCluster:
    """With the first weights, or with zeros in their place."""
    weights = from_module(copy.deepcopy(examples(TASK)[0].model).double())

    def zeros(name: str, spec: TensorSpec) -> torch.Tensor:
        return torch.zeros(spec.shape, dtype=spec.dtype)

    return VirtualCluster(compiled(cell(plan)), weights if trained else zeros, seed=SEED, keep_gradients=True)


def shards(of: VirtualCluster) -> Shards:
    everyone = [of.mesh.coordinates(rank) for rank in range(of.mesh.ranks)]
    return Shards(of.rank_program, list(zip(everyone, of.holdings, strict=True)))


def check_stored_once(folder: Path) -> None:
    """Every parameter, and what the optimizer keeps of it, under one name, each element once."""
    stored = FileSystemReader(folder).read_metadata().state_dict_metadata
    program = captured(TASK)
    assert set(stored) == {
        *(f"parameter/{p.name}" for p in program.parameters),
        *(f"state/{name}" for name in program.state),
        *(f"buffer/{name}" for name in program.buffers),
    }
    for name, tensor in stored.items():
        assert isinstance(tensor, TensorStorageMetadata)
        assert sum(math.prod(chunk.sizes) for chunk in tensor.chunks) == math.prod(tensor.size), name


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ("pp=2,fsdp=2", "fsdp=4"),
        ("pp=2,fsdp=2", "pp=4"),
        ("fsdp=4", "pp=2,fsdp=2"),
        ("pp=4", "pp=2,fsdp=2"),
        ("pp=2,fsdp=2,schedule=zb-v", "pp=2,tp=2,schedule=dualpipe"),
        ("pp=2,ddp=2,schedule=dualpipe", "pp=2,zero1=2"),
    ],
)
def test_another_plan_goes_on(written: str, read: str, tmp_path: Path) -> None:
    first, second = examples(TASK)
    before = cluster(written, trained=True)
    before.step(first.batch)
    check_stored_once(checkpoint.save(shards(before), tmp_path, step=1, seed=SEED))
    after = cluster(read, trained=False)
    after.steps = checkpoint.load(shards(after), tmp_path).step
    for mine, theirs in (
        (before.full_parameters(), after.full_parameters()),
        (before.full_state(), after.full_state()),
    ):
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(mine[name], theirs[name]) for name in mine)
    result = after.step(second.batch)
    found = compare(after, result.loss, result.norm, truth(TASK)[1])
    assert found.worst < TOLERANCE, found


def test_real_ranks_save_and_others_go_on(tmp_path: Path) -> None:
    saved = str(tmp_path / "saved")
    before = measure_on_processes(cell("pp=2,fsdp=2"), tmp_path / "first", [0], save=saved)
    check_stored_once(find(Path(saved)))
    after = measure_on_processes(cell("fsdp=4"), tmp_path / "second", [1], load=saved)
    assert max(before.worst, after.worst) < TOLERANCE, (before, after)
    # and one process that has all ranks of yet another plan
    alone = cluster("pp=4", trained=False)
    alone.steps = checkpoint.load(shards(alone), saved).step
    result = alone.step(examples(TASK)[1].batch)
    assert compare(alone, result.loss, result.norm, truth(TASK)[1]).worst < TOLERANCE
