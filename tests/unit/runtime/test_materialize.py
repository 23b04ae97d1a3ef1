"""First weights: the same on every mesh, from modules, files or functions, one tensor at a time."""

from __future__ import annotations

from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

from meshwright.compiler.diagnostics import MeshwrightError
from meshwright.compiler.graph.program import TensorSpec
from meshwright.compiler.mesh import Mesh
from meshwright.runtime.materialize import check_same_weights, from_module, from_safetensors, materialize, seeded
from meshwright.runtime.virtual import VirtualCluster
from tests.unit.runtime import toy

FOUR = Mesh((("data", 2), ("tensor", 2)))


class Tied(nn.Module):
    """The toy as a module whose parameter has two names."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(toy.IN, toy.OUT, dtype=torch.float64))
        self.head = nn.Module()
        self.head.w = self.w
        self.register_buffer("seen", torch.tensor(4))


def test_a_module_gives_its_weights_and_buffers() -> None:
    module = Tied()
    cluster = VirtualCluster(toy.program(FOUR, "fsdp"), from_module(module))
    assert torch.equal(cluster.full_parameters()["w"], module.w)
    assert cluster.full_buffers()["seen"] == 4
    cluster.step(toy.batch())
    assert module.seen == 4  # what the cluster changes is its own


def test_a_file_or_a_folder_gives_them_under_any_name(tmp_path: Path) -> None:
    w = torch.randn(toy.IN, toy.OUT, dtype=torch.float64)
    safetensors.torch.save_file({"head.w": w}, tmp_path / "a.safetensors")
    safetensors.torch.save_file({"seen": torch.tensor(2)}, tmp_path / "b.safetensors")
    cluster = VirtualCluster(toy.program(FOUR), from_safetensors(tmp_path))
    assert torch.equal(cluster.full_parameters()["w"], w)
    with pytest.raises(MeshwrightError, match=r"E0606.*no values for the buffer 'seen'"):
        VirtualCluster(toy.program(FOUR), from_safetensors(tmp_path / "a.safetensors"))


def test_seeded_weights_depend_on_seed_and_name_alone() -> None:
    def normal(name: str, spec: TensorSpec, generator: torch.Generator) -> Tensor:
        return torch.zeros(()) if name == "seen" else torch.randn(spec.shape, generator=generator)

    def full(mesh: Mesh, variant: str, seed: int) -> Tensor:
        return VirtualCluster(toy.program(mesh, variant), seeded(seed, normal)).full_parameters()["w"]

    assert torch.equal(full(FOUR, "ddp", 1), full(Mesh((("data", 3),)), "fsdp", 1))
    assert not torch.equal(full(FOUR, "ddp", 1), full(FOUR, "ddp", 2))


def test_each_is_asked_for_once_for_all_ranks() -> None:
    asked: list[str] = []

    def weights(name: str, spec: TensorSpec) -> Tensor:
        asked.append(name)
        return toy.weights("head.w" if name == "w" else name, spec)

    program = toy.program(FOUR)
    state = materialize(program, weights, [FOUR.coordinates(r) for r in range(4)])
    assert asked == ["w", "seen"]
    assert [h.state["w/momentum"].abs().sum() for h in state] == [0] * 4


def test_optimizer_state_begins_as_the_program_says() -> None:
    program = toy.program(FOUR, "fsdp")
    program.program.state_init["w/momentum"] = 0.5
    cluster = VirtualCluster(program, toy.weights)
    assert bool((cluster.full_state()["w/momentum"] == 0.5).all())


def test_faults_of_weights_are_told(tmp_path: Path) -> None:
    with pytest.raises(MeshwrightError, match=r"E0606.*shape \[1, 2\], the model needs \[5, 4\]"):
        VirtualCluster(toy.program(FOUR), lambda name, spec: torch.zeros(1, 2))
    with pytest.raises(MeshwrightError, match=r"E0606.*meta device"):
        VirtualCluster(toy.program(FOUR), lambda name, spec: torch.empty(spec.shape, device="meta"))
    with pytest.raises(MeshwrightError, match=r"E0606.*no weights file"):
        from_safetensors(tmp_path / "none.safetensors")
    with pytest.raises(MeshwrightError, match=r"E0606.*there are no weights in"):
        from_safetensors(tmp_path)
    (tmp_path / "broken.safetensors").write_bytes(b"nonsense")
    with pytest.raises(MeshwrightError, match=r"E0606.*not a readable safetensors file"):
        from_safetensors(tmp_path)


def test_ranks_with_other_weights_are_found() -> None:
    cluster = VirtualCluster(toy.program(FOUR), toy.weights)
    with pytest.raises(MeshwrightError, match=r"E0607.*rank 0 and rank 3 begin with different values of 'b'"):
        cluster.run(
            lambda e: check_same_weights({"a": 1, "b": int(e.communicator.rank == 3)}, e.communicator, FOUR.names)
        )
    cluster.run(lambda e: check_same_weights({"a": 1, "b": 2**32 - 1}, e.communicator, FOUR.names))
