"""The catalogue of devices, and the presets made of it."""

from __future__ import annotations

import pytest

from meshwright.compiler.cluster import catalogue
from meshwright.compiler.cluster.cluster_file import read_cluster
from meshwright.compiler.diagnostics import MeshwrightError


@pytest.mark.parametrize("name", catalogue.names())
def test_every_device_has_rates_links_and_sources(name: str) -> None:
    entry = catalogue.entry(name)
    device = entry.device
    assert device.name == name
    assert entry.description
    assert {"f32"} <= device.flops.keys() and {"f16", "bf16"} & device.flops.keys()
    assert 1e9 < min(device.flops.values()) <= max(device.flops.values()) < 1e16
    assert 1 << 30 < device.memory < 1 << 40
    assert 1e9 <= device.bandwidth < 1e14
    assert device.host_link <= device.bandwidth
    assert entry.tiers and all(tier.bandwidth > 0 for tier in entry.tiers)
    # an inner link is never slower than an outer one
    rates = [tier.rate for tier in entry.tiers]
    assert rates == sorted(rates, reverse=True)
    assert {"flops", "memory", "bandwidth", "host_link", "tier", "efficiency"} <= device.sources.keys()


def test_the_devices_that_the_field_uses_are_there() -> None:
    wanted = "v100-16 v100-32 a100-40 a100-80 h100 h200 h800 b200 b300 gb200 mi300x tpu-v4 tpu-v5p cpu".split()
    assert set(wanted) <= set(catalogue.names())


def test_published_figures() -> None:
    h100 = catalogue.entry("h100").device
    assert (h100.flops["bf16"], h100.flops["tf32"], h100.bandwidth) == (989e12, 494.5e12, 3.35e12)
    assert catalogue.entry("a100-40").device.bandwidth == 1.555e12
    assert catalogue.entry("h800").tiers[0].bandwidth == 200e9


def test_aliases_and_case_do_not_matter() -> None:
    assert catalogue.find("A100") == catalogue.entry("a100-80")
    assert catalogue.find("h1000") is None


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("h100x1", [1]),
        ("h100x4", [4]),
        ("h100x64", [8, 8]),
        ("a100x256", [8, 16, 2]),
        ("a100-40x16", [8, 2]),
        ("h100x16384", [8, 32, 64]),
        ("h100x376", [8, 47]),  # 47 nodes have no divisor: one group
        ("gb200x144", [72, 2]),
        ("tpu-v5px256", [256]),
        ("mi300xx8", [8]),
    ],
)
def test_presets_fill_nodes_and_groups_of_nodes(name: str, sizes: list[int]) -> None:
    cluster = read_cluster(name)
    assert [tier.size for tier in cluster.tiers] == sizes
    assert cluster.name == name


def test_few_devices_with_cables_to_each_peer_have_fewer_cables() -> None:
    whole, half = read_cluster("mi300xx8").tiers[0], read_cluster("mi300xx4").tiers[0]
    assert half.bandwidth == pytest.approx(whole.bandwidth * 3 / 7)
    assert read_cluster("h100x4").tiers[0].bandwidth == read_cluster("h100x8").tiers[0].bandwidth


def test_local_shares_this_machine_among_its_ranks() -> None:
    one, four = read_cluster("local", 1), read_cluster("local", 4)
    assert (one.ranks, four.ranks) == (1, 4)
    assert four.device.memory == one.device.memory // 4
    assert four.device.flops["f32"] == pytest.approx(one.device.flops["f32"] / 4)
    assert read_cluster("localx4") == four


@pytest.mark.parametrize(
    ("name", "code"), [("h100x60", "E0423"), ("h100x0", "E0417"), ("x100x8", "E0415"), ("h100", "E0410")]
)
def test_wrong_presets_are_refused(name: str, code: str) -> None:
    with pytest.raises(MeshwrightError) as refused:
        read_cluster(name)
    assert refused.value.diagnostics[0].code == code
