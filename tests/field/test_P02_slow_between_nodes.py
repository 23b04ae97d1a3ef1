"""P02: fine on one node, very slow on several. Shards stay inside a node, copies are across, and it is told before."""

from __future__ import annotations

from dataclasses import replace

import pytest

from meshwright.compiler.cluster.cluster import Cluster, Tier
from meshwright.compiler.cluster.presets import preset
from meshwright.compiler.search.candidate import Candidate
from meshwright.compiler.search.explain import reasons
from tests.field.deep import planned


def two_nodes() -> Cluster:
    """Two nodes of eight: 400 GB/s inside, 1 GB/s between them."""
    found = preset("h100x8")
    assert found is not None
    return Cluster("two nodes", found.device, (Tier("nvlink", 8, 400e9, 3e-6), Tier("ethernet", 2, 1e9, 3e-5)))


def test_shards_inside_the_node_and_copies_across() -> None:
    found = planned("8B", 256, two_nodes())
    assert found.best is not None
    one = found.best.candidate
    assert one.axes[0] == ("replica", 2), "what crosses the slow link is a copy's gradients, once a step"
    assert one.size("data", "tensor") == 8 and one.storage > 0
    assert "Sharding over 8 ranks with 2 copies" in "\n".join(reasons(found))


def test_sharding_over_all_nodes_is_predicted_to_be_slow() -> None:
    found = planned("8B", 256, two_nodes())
    assert found.best is not None
    everywhere = Candidate((("data", 16),), 3, microbatches=found.best.candidate.microbatches, prefetch=1)
    slow = found.prices.price(everywhere)
    assert slow.seconds > 1.5 * found.best.seconds
    assert sum(slow.exposed.values()) > 0.3 * slow.seconds


def test_with_fast_links_between_nodes_it_is_another_plan() -> None:
    slow = two_nodes()
    fast = replace(slow, name="fast", tiers=(slow.tiers[0], replace(slow.tiers[1], bandwidth=50e9, latency=5e-6)))
    found = planned("8B", 256, fast)
    assert found.best is not None
    on_slow = planned("8B", 256, slow)
    assert on_slow.best is not None
    assert found.best.seconds < on_slow.best.seconds


@pytest.mark.slow
def test_tensor_parallelism_never_crosses_the_slow_link() -> None:
    found = planned("8B", 16, two_nodes())
    assert found.best is not None
    assert found.best.candidate.size("tensor") <= 8 and found.best.candidate.axes[0][0] != "tensor"
