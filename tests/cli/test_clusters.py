"""``meshwright clusters``: lists, drawings and JSON."""

from __future__ import annotations

import json
from pathlib import Path

from meshwright.compiler.cluster import catalogue
from tests.cli.conftest import invoke


def test_clusters_lists_devices_and_presets() -> None:
    result = invoke("clusters")
    assert result.exit_code == 0
    assert all(name in result.output for name in catalogue.names())
    assert "h100x64" in result.output
    listed = json.loads(invoke("clusters", "--json").output)
    assert set(listed["devices"]) == set(catalogue.names())
    assert listed["devices"]["h100"]["flops"]["bf16"] == 989e12
    assert listed["devices"]["h100"]["sources"]["flops"]


def test_clusters_draws_one(tmp_path: Path) -> None:
    drawn = invoke("clusters", "a100x256").output
    assert drawn.startswith("a100x256: 256 devices\n")
    assert "16 x nvlink: connects 8, 300 GB/s for each device" in drawn
    file = tmp_path / "pair.toml"
    file.write_text(
        '[[node]]\nname = "n"\ndevice = "cpu"\nrepeat = 2\n[[link]]\nbetween = ["n0", "n1"]\nbandwidth = 1e9\n'
    )
    assert "── 1 GB/s, 1 us ── n1" in invoke("clusters", file).output
    assert json.loads(invoke("clusters", file, "--json").output)["network"]["links"][0]["bandwidth"] == 1e9
    assert "3 devices" in invoke("clusters", "local", "--ranks", 3).output


def test_a_wrong_cluster_ends_with_its_error() -> None:
    # what is printed is told in docs/errors, which is tested there
    assert invoke("clusters", "h100x60").exit_code == 1
