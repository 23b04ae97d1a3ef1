"""The page on clusters says what is so: its files can be read, and its drawing is the one that is made."""

from __future__ import annotations

import re
from pathlib import Path

from meshwright.compiler.cluster.cluster import Degraded
from meshwright.compiler.cluster.cluster_file import read_cluster
from meshwright.compiler.cluster.crossing import crossings
from meshwright.compiler.cluster.drawing import draw
from meshwright.compiler.mesh import Mesh

PAGE = (Path(__file__).parents[2] / "docs" / "clusters.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


def test_the_drawing_is_the_one_that_is_made() -> None:
    assert blocks("text")[0] == draw(read_cluster("a100x256"))


def test_the_files_of_the_page_are_read() -> None:
    tiers, device, mixed, degraded, network = blocks("toml")
    cluster = read_cluster(tiers)
    assert [tier.size for tier in cluster.tiers] == [8, 16, 4]
    assert cluster.tiers[2].rate == 25e9

    links = '\n[[tier]]\nname = "links"\nsize = 64\nbandwidth = "31 GB/s"\nlatency = "5 us"\n'
    assert read_cluster(device + links).device.flops == {"bf16": 181e12, "f32": 91e12}
    assert [count for _, count in read_cluster(mixed + links).mixed] == [32, 32]
    assert read_cluster(tiers + degraded).degraded == (Degraded("infiniband", 0.5, (3,)),)

    explicit = read_cluster(network)
    assert explicit.ranks == 64
    mesh = Mesh((("data", 8), ("tensor", 8)))
    (crossed,) = crossings(explicit, mesh, ("data",))
    assert crossed.bandwidth == 25e9  # the degraded cable, shared by eight groups
