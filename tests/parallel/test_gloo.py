"""Real gloo ranks against the virtual cluster, and checkpoints between numbers of ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from meshwright.compiler.graph.collectives import Communicator
from meshwright.compiler.mesh import Mesh
from meshwright.runtime import checkpoint
from meshwright.runtime.checkpoint_planner import Shards
from meshwright.runtime.communicator import ProcessCommunicator
from meshwright.runtime.environment import place_of
from meshwright.runtime.gather import full_state_dict
from meshwright.runtime.metrics import read_metrics
from meshwright.runtime.train import train
from meshwright.runtime.virtual import VirtualCluster
from meshwright.runtime.worker import Session, executor_of, run_session
from tests.parallel.programs import Axes, job
from tests.parallel.ranks import run_ranks, values
from tests.unit.runtime import toy

FOUR: Axes = (("data", 2), ("tensor", 2))


def trained(options: dict[str, Any]) -> tuple[list[tuple[float, float | None]], dict[str, Tensor]]:
    """Train the toy on this rank; loss and norm of every step, and the whole weights."""
    made = job(**options)
    kept: list[Any] = []

    def body(session: Session) -> None:
        executor = executor_of(made, session)
        history = train(executor, made.source, made.scalars, made.config)
        kept.append(([(m.loss, m.norm) for m in history], full_state_dict(executor)))

    assert run_session(made.rank_program, place_of(), body) == 0
    result: tuple[list[tuple[float, float | None]], dict[str, Tensor]] = kept[0]
    return result


@pytest.mark.parametrize(
    ("variant", "microbatches", "dtype"),
    [("ddp", 1, torch.float64), ("fsdp", 2, torch.float64), ("fsdp", 2, torch.float32)],
    ids=["ddp-f64", "fsdp-f64", "fsdp-f32"],
)
def test_four_ranks_equal_the_virtual_cluster(variant: str, microbatches: int, dtype: torch.dtype) -> None:
    options = {"variant": variant, "axes": FOUR, "steps": 3, "microbatches": microbatches, "dtype": dtype}
    found = values(run_ranks(4, trained, options))
    cluster = VirtualCluster(toy.program(Mesh(FOUR), variant, microbatches, dtype), toy.weights)
    expected = [cluster.step(toy.batch(s, dtype), {"0/lr": 0.1 / (s + 1)}) for s in range(3)]
    tolerance = 1e-5 if dtype == torch.float32 else 1e-13
    for history, weights in found:
        for (loss, norm), result in zip(history, expected, strict=True):
            assert loss == pytest.approx(result.loss, rel=tolerance)
            assert norm == pytest.approx(result.norm, rel=tolerance)
        assert set(weights) == {"w", "head.w", "seen"}  # a tied parameter under both names
        torch.testing.assert_close(weights["w"], cluster.full_parameters()["w"], rtol=tolerance, atol=tolerance)
        assert torch.equal(weights["w"], found[0][1]["w"])


AXES = [("tensor", "data"), ("data", "tensor"), ("tensor",)]
DTYPES = [torch.float32, torch.bfloat16, torch.int64]


def every_collective(here: Communicator) -> list[Tensor]:
    """Every collective over the axes in any order, in several dtypes."""
    results: list[Tensor] = []
    for axes in AXES:
        for dtype in DTYPES:
            count = here.mesh.size(*axes)
            own = 20 * here.coordinate("data") + 10 * here.coordinate("tensor")
            x = (torch.arange(2 * count) + own).to(dtype)
            results.extend(here.all_reduce(x.clone(), axes, r) for r in ("sum", "max", "min"))
            results.extend([here.all_gather(x, axes), here.reduce_scatter(x, axes), here.all_to_all(x, axes)])
    return results


def collectives() -> list[Tensor]:
    kept: list[Tensor] = []

    def body(session: Session) -> None:
        kept.extend(every_collective(ProcessCommunicator(Mesh(FOUR), 1, AXES)))

    assert run_session(toy.program(Mesh(FOUR)), place_of(), body) == 0
    return kept


def test_collectives_equal_those_of_the_virtual_cluster() -> None:
    found = values(run_ranks(4, collectives))
    cluster = VirtualCluster(toy.program(Mesh(FOUR)), toy.weights)
    expected = cluster.run(lambda executor: every_collective(executor.communicator))
    assert len(expected[0]) == len(AXES) * len(DTYPES) * 6
    for real, virtual in zip(found, expected, strict=True):
        for a, b in zip(real, virtual, strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("check", ["0", "1"])
def test_a_run_that_is_stopped_and_resumed_goes_on_bit_for_bit(check: str, tmp_path: Path) -> None:
    common = {"variant": "fsdp", "axes": FOUR, "dtype": torch.float32, "every": 2}
    variables = {"MESHWRIGHT_CHECK": check}
    straight = values(run_ranks(4, trained, {**common, "steps": 5, "folder": str(tmp_path / "a")}))
    folder = str(tmp_path / "b")
    values(run_ranks(4, trained, {**common, "steps": 3, "folder": folder}, variables=variables))
    resumed = values(
        run_ranks(4, trained, {**common, "steps": 5, "folder": folder, "resume": True}, variables=variables)
    )
    assert resumed[0][0] == straight[0][0][3:]
    assert torch.equal(resumed[0][1]["w"], straight[0][1]["w"])
    told = [(m.step, m.loss) for m in read_metrics(tmp_path / "b" / "metrics.jsonl")]
    assert told == [(m.step, m.loss) for m in read_metrics(tmp_path / "a" / "metrics.jsonl")]
    assert [step for step, _ in told] == list(range(5))


@pytest.mark.parametrize("axes", [(("data", 2),), (("tensor", 2), ("data", 1)), (("data", 1),)], ids=str)
def test_other_numbers_of_ranks_load_it(axes: Axes, tmp_path: Path) -> None:
    folder = str(tmp_path)
    saved = values(run_ranks(4, trained, {"variant": "fsdp", "axes": FOUR, "steps": 2, "folder": folder}))
    ranks = Mesh(axes).ranks
    options = {"variant": "ddp", "axes": axes, "steps": 2, "folder": folder, "resume": True}
    loaded = values(run_ranks(ranks, trained, options))
    assert torch.equal(saved[0][1]["w"], loaded[0][1]["w"])
    assert loaded[0][1]["seen"] == 2
    # and a virtual cluster reads what real ranks wrote
    cluster = VirtualCluster(toy.program(Mesh((("data", 3),)), "fsdp"), toy.weights)
    coordinates = [cluster.mesh.coordinates(r) for r in range(3)]
    checkpoint.load(Shards(cluster.rank_program, list(zip(coordinates, cluster.holdings, strict=True))), folder)
    assert torch.equal(cluster.full_parameters()["w"], saved[0][1]["w"])
