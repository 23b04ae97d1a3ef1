"""Cluster files: what they say, and that what is written is read back."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from meshwright.compiler.cluster import catalogue
from meshwright.compiler.cluster.cluster import Cluster, Collective, Degraded, Tier
from meshwright.compiler.cluster.cluster_file import read_cluster
from meshwright.compiler.cluster.drawing import as_json, draw
from meshwright.compiler.cluster.writer import cluster_to_toml
from meshwright.compiler.diagnostics import MeshwrightError

NODES = """
device = "h100"

[[tier]]
name = "nvlink"
size = 8

[[tier]]
name = "infiniband"
size = 4
bandwidth = "200 Gb/s"
"""


def test_a_tier_of_the_device_s_own_name_takes_its_figures() -> None:
    cluster = read_cluster(NODES)
    usual = catalogue.entry("h100").tiers
    assert cluster.tiers[0] == replace(usual[0], size=8)
    assert cluster.tiers[1] == replace(usual[1], size=4, bandwidth=25e9)
    assert cluster.device == catalogue.entry("h100").device


def test_a_device_may_be_described_in_the_file() -> None:
    cluster = read_cluster(
        """
[device]
name = "mine"
memory = "16 GiB"
bandwidth = 5e11
[device.flops]
bf16 = "100 TFLOP/s"
[device.efficiency]
matmul = 0.7
launch = "4 us"
[[tier]]
name = "pcie"
size = 2
bandwidth = "31 GB/s"
latency = "3 us"
"""
    )
    assert cluster.device.name == "mine"
    assert (cluster.device.memory, cluster.device.bandwidth) == (16 << 30, 5e11)
    assert cluster.device.flops == {"bf16": 1e14}
    assert (cluster.device.efficiency.matmul, cluster.device.efficiency.launch) == (0.7, pytest.approx(4e-6))
    assert cluster.tiers[0].latency == pytest.approx(3e-6)


def test_of_mixed_devices_all_are_kept_and_the_least_counts() -> None:
    cluster = read_cluster(
        """
[[devices]]
device = "h100"
count = 8
[[devices]]
device = "a100-40"
count = 8
[[tier]]
name = "nvlink"
size = 8
bandwidth = "300 GB/s"
latency = "1 us"
[[tier]]
name = "infiniband"
size = 2
bandwidth = "200 Gb/s"
latency = "3 us"
"""
    )
    h100, a100 = catalogue.entry("h100").device, catalogue.entry("a100-40").device
    assert cluster.mixed == ((h100, 8), (a100, 8))
    assert cluster.device.memory == a100.memory
    assert cluster.device.flops["bf16"] == a100.flops["bf16"]
    assert "f8" not in cluster.device.flops
    assert (cluster.device_of(7), cluster.device_of(8)) == (h100, a100)


def test_nodes_may_have_different_devices() -> None:
    cluster = read_cluster(
        """
[[node]]
name = "new"
device = "h200"
count = 8
[[node]]
name = "old"
device = "a100"
count = 4
[[link]]
between = ["new", "old"]
bandwidth = "50 GB/s"
"""
    )
    assert cluster.ranks == 12
    assert [count for _, count in cluster.mixed] == [8, 4]
    assert cluster.device_of(11).name == "a100-80"
    assert cluster.device.memory == catalogue.entry("a100-80").device.memory
    assert [tier.size for tier in cluster.tiers] == [12]


def test_degraded_links_are_kept() -> None:
    cluster = read_cluster(
        NODES
        + '[[degraded]]\ntier = "nvlink"\nfactor = 0.9\n'
        + '[[degraded]]\ntier = "infiniband"\nmember = 3\nfactor = 0.5\n'
        + '[[degraded]]\ntier = "infiniband"\nbetween = [0, 2]\nfactor = 0.25\n'
    )
    assert cluster.degraded == (
        Degraded("nvlink", 0.9),
        Degraded("infiniband", 0.5, (3,)),
        Degraded("infiniband", 0.25, (0, 2)),
    )


def test_a_written_cluster_is_read_back() -> None:
    tiers = (
        Tier("node", 4, 1.234e9, 1.5e-6, 0.5, 2.0, 3e-5, 1e6, 0.3, 0.7, True, (Collective("all-gather", 0.5, 1e-4),)),
        Tier("network", 2, 5e8, 0.0),
    )
    for cluster in (Cluster('mine "own"', catalogue.entry("a100-80").device, tiers), read_cluster("h100x64")):
        assert read_cluster(cluster_to_toml(cluster, ["a comment", ""])) == cluster


def test_a_file_is_read_by_its_path(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text(NODES)
    assert read_cluster(tmp_path / "mine.toml", 32).name == "mine"
    with pytest.raises(MeshwrightError, match="E0419"):
        read_cluster(str(tmp_path / "mine.toml"), 8)


def test_a_file_with_the_name_of_a_preset_is_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("h100x8").write_text(NODES)
    assert read_cluster("h100x8").ranks == 32


def test_drawings_show_rates_and_what_is_degraded() -> None:
    text = draw(read_cluster(NODES + '[[degraded]]\ntier = "infiniband"\nmember = 3\nfactor = 0.5\n'))
    assert "32 devices" in text
    assert "infiniband: connects 4, 25 GB/s for each device" in text
    assert "4 x nvlink: connects 8, 450 GB/s for each device" in text
    assert "degraded: infiniband of 3 at 50%" in text
    assert as_json(read_cluster(NODES))["ranks"] == 32


@pytest.mark.parametrize(
    ("change", "codes"),
    [
        (("size = 8", ""), ["E0414"]),
        (("size = 8", "size = -1"), ["E0417"]),
        (("size = 8", "size = 8\nbandwidth = 0"), ["E0417"]),
        (("size = 8", "size = 8\nefficiency = 3.0"), ["E0417"]),
        (("size = 8", "size = 8\noversubscription = 0.5"), ["E0417"]),
        (("200 Gb/s", "200"), ["E0416"]),
        (('"h100"', '"h10"'), ["E0415", "E0414"]),
        (('"h100"', "5"), ["E0413"]),
        (('name = "nvlink"', 'nam = "nvlink"'), ["E0412", "E0414"]),
        (('"infiniband"', '"nvlink"'), ["E0420"]),
        (('device = "h100"', "[[devices]]\ndevice = 'h100'\ncount = 3\n[[devices]]\ndevice = 'h100'\ncount = 4"), None),
        (("[[tier]]", "[tier]"), ["E0413"]),
        (('device = "h100"', 'device = "h100"\nranks = 33'), ["E0419"]),
    ],
)
def test_faults_have_codes_and_places(change: tuple[str, str], codes: list[str] | None) -> None:
    one_tier = NODES[: NODES.rindex("[[tier]]")]  # two [tier] tables would be no TOML
    text = (one_tier if change[0] == "[[tier]]" else NODES).replace(*change, 1)
    with pytest.raises(MeshwrightError) as refused:
        read_cluster(text)
    found = {d.code for d in refused.value.diagnostics}
    assert codes is None or set(codes) <= found
    assert all(d.place is not None and d.action for d in refused.value.diagnostics)
