"""Explicit nodes and links: what their cuts give to groups."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshwright.compiler.cluster.cluster import Cluster
from meshwright.compiler.cluster.cluster_file import read_cluster
from meshwright.compiler.cluster.collectives import message_cost
from meshwright.compiler.cluster.crossing import crossings
from meshwright.compiler.cluster.topology import graph_of
from meshwright.compiler.mesh import Mesh

DGX1 = Path(__file__).parents[2] / "data" / "dgx1.toml"
FABRIC = """
name = "fabric"

[[node]]
name = "n"
device = "h100"
count = 8
repeat = 8

[[switch]]
name = "leaf"
repeat = 2

[[switch]]
name = "spine"
repeat = 4

[[link]]
between = ["n[0-3]", "leaf0"]
bandwidth = "400 GB/s"
latency = "1.35 us"

[[link]]
between = ["n[4-7]", "leaf1"]
bandwidth = "400 GB/s"
latency = "1.35 us"

[[link]]
between = ["leaf*", "spine*"]
bandwidth = "200 GB/s"
latency = 0
"""
TIERS = """
device = "h100"

[[tier]]
name = "nvlink"
size = 8

[[tier]]
name = "infiniband"
size = 4

[[tier]]
name = "spine"
size = 2
oversubscription = 2
"""


def slowest_rate(cluster: Cluster, mesh: Mesh, axes: tuple[str, ...]) -> float:
    """Bytes per second that the group's ring reaches in its slowest tier, before efficiency."""
    return min(c.bandwidth * c.inside for c in crossings(cluster, mesh, axes))


@pytest.mark.parametrize(
    ("mesh", "axes"),
    [
        ((("all", 64),), ("all",)),
        ((("data", 8), ("tensor", 8)), ("data",)),
        ((("data", 8), ("tensor", 8)), ("tensor",)),
        ((("data", 2), ("tensor", 32)), ("data",)),
        ((("data", 2), ("tensor", 32)), ("tensor",)),
        ((("data", 4), ("tensor", 16)), ("data",)),
        ((("data", 4), ("tensor", 16)), ("tensor",)),
        ((("pipe", 2), ("data", 16), ("tensor", 2)), ("pipe",)),
        ((("pipe", 2), ("data", 16), ("tensor", 2)), ("data",)),
        ((("pipe", 2), ("data", 16), ("tensor", 2)), ("pipe", "data")),
    ],
)
def test_a_fabric_of_links_and_the_same_fabric_as_tiers_agree(
    mesh: tuple[tuple[str, int], ...], axes: tuple[str, ...]
) -> None:
    explicit, tiers = read_cluster(FABRIC), read_cluster(TIERS)
    assert slowest_rate(explicit, Mesh(mesh), axes) == pytest.approx(slowest_rate(tiers, Mesh(mesh), axes))


@pytest.mark.parametrize(("gpus", "cables"), [(2, 1), (3, 2), (4, 4), (7, 4), (8, 6)])
def test_a_hybrid_cube_has_as_many_rings_as_its_smallest_cut(gpus: int, cables: int) -> None:
    """The all-reduce rates that were measured on such a machine are 22.5, 45, 85, 87 and 134 GB/s."""
    mesh = Mesh((("all", gpus),))
    assert slowest_rate(read_cluster(DGX1), mesh, ("all",)) == pytest.approx(cables * 25e9)


def test_groups_that_share_a_trunk_share_its_rate() -> None:
    nodes = "".join(f'[[node]]\nname = "{n}"\ndevice = "h100"\n' for n in "abcd")
    links = "".join(
        f'[[link]]\nbetween = ["{one}", "{other}"]\nbandwidth = "{rate} GB/s"\n'
        for one, other, rate in (("a", "left", 50), ("b", "left", 50), ("c", "right", 50), ("d", "right", 50))
    )
    trunk = '[[link]]\nbetween = ["left", "right"]\nbandwidth = "60 GB/s"\n'
    text = nodes + '[[switch]]\nname = "left"\n[[switch]]\nname = "right"\n' + links + trunk
    cluster = read_cluster(text)
    mesh = Mesh((("outer", 2), ("inner", 2)))  # outer: a with c, b with d
    assert slowest_rate(cluster, mesh, ("inner",)) == pytest.approx(50e9)
    assert slowest_rate(cluster, mesh, ("outer",)) == pytest.approx(30e9)
    assert slowest_rate(cluster, mesh, ("outer", "inner")) == pytest.approx(50e9)


def test_a_ring_of_nodes_uses_both_directions() -> None:
    nodes = '[[node]]\nname = "n"\ndevice = "h100"\nrepeat = 4\n'
    links = "".join(f'[[link]]\nbetween = ["n{i}", "n{(i + 1) % 4}"]\nbandwidth = "25 GB/s"\n' for i in range(4))
    assert slowest_rate(read_cluster(nodes + links), Mesh((("all", 4),)), ("all",)) == pytest.approx(50e9)


def test_a_degraded_link_slows_the_groups_over_it() -> None:
    slow = read_cluster(FABRIC + '\n[[degraded]]\nbetween = ["n2", "leaf0"]\nfactor = 0.25\n')
    mesh = Mesh((("data", 8), ("tensor", 8)))
    assert slowest_rate(slow, mesh, ("data",)) == pytest.approx(12.5e9)
    assert slowest_rate(slow, mesh, ("tensor",)) == pytest.approx(450e9)


def test_a_network_has_a_summary_in_tiers() -> None:
    cluster = read_cluster(FABRIC)
    assert cluster.ranks == 64
    assert [(t.name, t.size) for t in cluster.tiers] == [("nvlink", 8), ("network", 8)]
    assert cluster.tiers[1].bandwidth == pytest.approx(50e9)


def test_the_latency_of_a_network_is_that_of_its_longest_hop() -> None:
    mesh = Mesh((("data", 8), ("tensor", 8)))
    (crossed,) = crossings(read_cluster(FABRIC), mesh, ("data",))
    assert crossed.tier.latency == pytest.approx(2.7e-6)
    assert message_cost(read_cluster(FABRIC), mesh, ("data",), "all-gather", 8).seconds > 7 * 2.7e-6


def test_tiers_have_a_graph_too() -> None:
    graph = graph_of(read_cluster("h100x64"))
    kinds = [data["kind"] for _, data in graph.nodes(data=True)]
    assert (kinds.count("device"), kinds.count("switch")) == (64, 9)
    assert graph.edges[("nvlink", 0), ("infiniband", 0)]["bandwidth"] == pytest.approx(8 * 50e9)
    slow = read_cluster(TIERS + '\n[[degraded]]\ntier = "infiniband"\nmember = 3\nfactor = 0.5\n')
    assert graph_of(slow).edges[("nvlink", 3), ("infiniband", 0)]["bandwidth"] == pytest.approx(8 * 25e9)
    assert graph_of(read_cluster(FABRIC)).number_of_nodes() == 14
