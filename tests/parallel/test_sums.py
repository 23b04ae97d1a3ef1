"""Sums in half precision over real gloo ranks: as predicted where they stay as written, at the floor where widened."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from meshwright.compiler.emit.artefact import write_artefact
from meshwright.compiler.emit.manifest import SourceDescription
from meshwright.compiler.graph import collectives
from meshwright.compiler.mesh import Mesh
from meshwright.compiler.numerics.error_model import Addends, error_of_sum, one_rounding
from meshwright.compiler.train_settings import TrainSettings
from meshwright.runtime.communicator import ProcessCommunicator
from meshwright.runtime.environment import place_of
from meshwright.runtime.materialize import from_module
from meshwright.runtime.virtual import VirtualCluster
from meshwright.runtime.worker import Session, run_session
from tests.parallel.measured_sums import by_gloo
from tests.parallel.programs import train_artefact
from tests.parallel.ranks import run_ranks, values
from tests.parallel.test_failures import FOUR
from tests.parallel.test_gloo import AXES
from tests.unit.numerics.known_sums import compiled, samples
from tests.unit.runtime import toy


@pytest.mark.parametrize("addends", ["random signs", "coherent"])
def test_gloo_adds_as_predicted(addends: Addends) -> None:
    predicted = error_of_sum("bf16", 4, addends)
    for found in values(run_ranks(4, by_gloo, addends, torch.bfloat16)):
        assert predicted / 2 < found["all_reduce"] < 2 * predicted
        assert predicted / 2 < found["reduce_scatter"] < 2 * predicted
        assert found["reduce_scatter_wide"] < 1.2 * one_rounding("bf16")


@pytest.mark.parametrize("plan", ["fsdp=4,prefetch", "ddp=4", "ddp=2,fsdp=2,micro=2"])
def test_a_safe_step_equals_the_virtual_cluster(plan: str, tmp_path: Path) -> None:
    """Bit for bit: sums in fp32 that are added in one order."""
    width, count = 4096 * 4, 8
    model, program = compiled(plan, width, count, "safe")
    folder = tmp_path / "build"
    write_artefact(program, folder, SourceDescription("module", "tests.models"), TrainSettings())
    x = samples(count, width, "random signs", torch.bfloat16)
    saved = dict(model.state_dict())
    found = values(run_ranks(4, train_artefact, str(folder), saved, {"x": x}, 2))
    cluster = VirtualCluster(program, from_module(model), seed=3)
    expected = [cluster.step({"x": x}) for _ in range(2)]
    for history, weights in found:
        assert [loss for loss, _ in history] == pytest.approx([r.loss for r in expected], rel=1e-6)
        assert torch.equal(weights["w"], cluster.full_parameters()["w"])


def wide_sums(here: collectives.Communicator) -> list[Tensor]:
    """Over groups that cross, padded and not, alone and joined, begun and waited for."""
    own = 10.0 * here.coordinate("data") + here.coordinate("tensor")
    found: list[Tensor] = []
    with collectives.use(here):
        for axes in AXES:
            xs = [(torch.arange(n * 2.0).view(n, 2) + own).bfloat16() for n in (5, 8, 3)]
            began = collectives.reduce_scatter_wide_begin(xs, [0, 0, 1], axes, torch.float32)
            found += [collectives.reduce_scatter_wide(x, 0, axes, torch.bfloat16) for x in xs]
            found += collectives.reduce_scatter_wide_many(xs, [0, 1, 0], axes, torch.float32)
            found += collectives.wait(began)
    return [x.clone() for x in found]


def many_wide_sums() -> list[Tensor]:
    kept: list[Tensor] = []

    def body(session: Session) -> None:
        kept.extend(wide_sums(ProcessCommunicator(Mesh(FOUR), 1, AXES)))

    assert run_session(toy.program(Mesh(FOUR)), place_of(), body) == 0
    return kept


def narrow_sums(here: collectives.Communicator) -> list[Tensor]:
    """The same by reduce-scatters in fp32, which these small whole numbers are exact in."""
    own = 10.0 * here.coordinate("data") + here.coordinate("tensor")
    found: list[Tensor] = []
    with collectives.use(here):
        for axes in AXES:
            xs = [torch.arange(n * 2.0).view(n, 2) + own for n in (5, 8, 3)]
            found += [collectives.reduce_scatter(x, 0, axes).bfloat16() for x in xs]
            found += [collectives.reduce_scatter(x, d, axes) for x, d in zip(xs, (0, 1, 0), strict=True)]
            found += [collectives.reduce_scatter(x, d, axes) for x, d in zip(xs, (0, 0, 1), strict=True)]
    return [x.clone() for x in found]


def test_wide_sums_lie_as_reduce_scatters_do() -> None:
    cluster = VirtualCluster(toy.program(Mesh(FOUR)), toy.weights)
    expected = cluster.run(lambda executor: narrow_sums(executor.communicator))
    virtual = cluster.run(lambda executor: wide_sums(executor.communicator))
    real = values(run_ranks(4, many_wide_sums))
    for found in (virtual, real):
        for mine, theirs in zip(found, expected, strict=True):
            assert len(mine) == len(AXES) * 9
            for a, b in zip(mine, theirs, strict=True):
                assert a.dtype == b.dtype and torch.equal(a, b)
