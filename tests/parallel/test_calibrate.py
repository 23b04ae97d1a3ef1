"""Calibration on real ranks: what is written is a cluster that can be read and priced."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshwright.compiler.cluster.cluster_file import read_cluster
from meshwright.compiler.cluster.collectives import message_cost
from meshwright.compiler.mesh import Mesh
from tests.parallel.ranks import run_ranks, values


def calibrated(path: str) -> int:
    """One rank, with budgets for a test."""
    from meshwright import calibration
    from meshwright.runtime import measure_kernels, measure_links, measure_passes

    measure_kernels.BUDGET = measure_links.BUDGET = 0.002
    measure_passes.PASSES = 2
    return calibration.calibrate_worker(Path(path))


@pytest.mark.parametrize(
    ("ranks", "on_a_node", "tiers"), [pytest.param(2, 2, ["node"], marks=pytest.mark.slow), (4, 2, ["node", "network"])]
)
def test_ranks_measure_their_machine_together(ranks: int, on_a_node: int, tiers: list[str], tmp_path: Path) -> None:
    file = tmp_path / "measured.toml"
    outcomes = run_ranks(ranks, calibrated, str(file), variables={"LOCAL_WORLD_SIZE": str(on_a_node)}, timeout=120)
    assert values(outcomes) == [0] * ranks
    cluster = read_cluster(file, ranks)
    assert [tier.name for tier in cluster.tiers] == tiers
    assert {"f32", "f64", "bf16"} <= cluster.device.flops.keys()
    assert 1e8 < cluster.device.flops["f32"] < 1e13
    assert 0 < cluster.device.efficiency.memory <= 3
    mesh = Mesh((("all", ranks),))
    small, large = (message_cost(cluster, mesh, ("all",), "all-gather", size).seconds for size in (1 << 10, 1 << 26))
    assert 0 < small < large < 60
    assert "# collectives" not in file.read_text().splitlines()[0]
    assert "all-to-all" in file.read_text()


def test_what_messages_cost_beside_kernels() -> None:
    from meshwright.runtime.measure_links import Beside

    hidden, shared = Beside(2.0, 6.0, 6.0), Beside(2.0, 6.0, 8.0)
    assert (hidden.hidden, shared.hidden) == (1.0, 0.0)
    assert (hidden.longer, shared.longer) == (0.5, 2.0)
