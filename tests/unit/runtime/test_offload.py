"""Offloaded optimizer state: the same numbers, on the host, in checkpoints that any other run loads."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest
import torch

import meshwright
from meshwright.compiler.diagnostics import MeshwrightError
from meshwright.runtime.host_memory import HostTensor, host_tensors
from tests.unit.passes.stack import Stack, batch, model

CPU = torch.device("cpu")


def step_of(made: Stack, plan: str, ranks: int) -> meshwright.Step:
    optimizer = torch.optim.AdamW(made.parameters(), lr=0.1)
    return meshwright.parallelize(made, optimizer=optimizer, batch=batch(), plan=plan, clip=1.0, virtual=ranks)


def trained(plan: str, ranks: int, steps: int = 2, load: Path | None = None) -> meshwright.Step:
    step = step_of(model(2, 32), plan, ranks)
    if load is not None:
        step.load(load)
    for _ in range(steps):
        step(batch())
    return step


def same(a: meshwright.Step, b: meshwright.Step, tolerance: float) -> None:
    for name, value in a.full_state_dict().items():
        torch.testing.assert_close(b.full_state_dict()[name], value, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    "plan",
    ["fsdp", *(pytest.param(plan, marks=pytest.mark.slow) for plan in ("zero1", "ddp")), "fsdp,micro=2,prefetch"],
)
def test_training_is_the_same_bit_for_bit(plan: str) -> None:
    same(trained(plan, 2), trained(f"{plan},offload", 2), 0.0)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        pytest.param(("fsdp,offload", 2), ("ddp", 1), marks=pytest.mark.slow),
        pytest.param(("ddp", 1), ("fsdp,offload", 4), marks=pytest.mark.slow),
        (("zero2,offload", 2), ("fsdp,offload", 4)),
    ],
)
def test_a_checkpoint_goes_on_elsewhere(
    first: tuple[str, int], second: tuple[str, int], tmp_path: Path
) -> None:  # fmt: skip
    trained(*first).save(tmp_path)
    same(trained("ddp", 1, steps=4), trained(*second, steps=2, load=tmp_path), 1e-9)


def test_the_file_has_no_name_and_goes_with_the_tensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    wanted = {"a": HostTensor((3, 5), torch.float32, 0.0), "b": HostTensor((7,), torch.float64, 2.0),
              "c": HostTensor((), torch.int64, 1.0)}  # fmt: skip
    made = host_tensors(wanted, CPU)
    assert not list(tmp_path.iterdir())
    assert {n: (tuple(t.shape), t.dtype, t.unique().tolist()) for n, t in made.items()} == {
        "a": ((3, 5), torch.float32, [0.0]),
        "b": ((7,), torch.float64, [2.0]),
        "c": ((), torch.int64, [1]),
    }
    made["a"].fill_(9.0)
    assert made["b"].tolist() == [2.0] * 7, "each has memory of its own"


def test_no_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(MeshwrightError, match=r"E0628(.|\n)*No space left on device(.|\n)*TMPDIR"):
        host_tensors({"a": HostTensor((3,), torch.float32, 0.0)}, CPU)
    assert not list(tmp_path.iterdir())
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "none"))
    with pytest.raises(MeshwrightError, match="E0628"):
        host_tensors({"a": HostTensor((3,), torch.float32, 0.0)}, CPU)
