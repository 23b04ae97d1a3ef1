"""Constants are found again from seconds that were made with them."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from meshwright.compiler.cluster.cluster import Cluster, Tier
from meshwright.compiler.cluster.cluster_file import read_cluster
from meshwright.compiler.cluster.collectives import message_cost
from meshwright.compiler.cluster.declared import Observed, compare_declared, compare_observed
from meshwright.compiler.cluster.device import Device, Efficiency
from meshwright.compiler.cluster.fitting import Sent, Timed, fit_device, fit_tier
from meshwright.compiler.cluster.kernels import kernel_seconds
from meshwright.compiler.mesh import Mesh
from meshwright.compiler.summary import Kernel, MessageKind

KINDS: tuple[MessageKind, ...] = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all")
SIZES = (1 << 12, 1 << 17, 1 << 21, 1 << 24)


def kernels() -> list[Kernel]:
    found = [
        Kernel("mm", "matmul", 2.0 * m * n * k, 4 * (m * k + k * n), 4 * m * n, "f32", (1, m, n, k))
        for m, n, k in [(64, 64, 64), (256, 256, 256), (512, 512, 512), (1024, 128, 128), (2048, 2048, 2048)]
    ]
    for name in ("attention", "attention_backward"):
        found.append(Kernel(name, "attention", 1e9, 1 << 16, 1 << 16, "f32", (1, 4, 512, 512, 64)))
    return found + [Kernel("add", "elementwise", n, 8 * n, 4 * n) for n in (1 << 14, 1 << 20, 1 << 24)]


def test_efficiencies_of_a_device_are_found_again() -> None:
    truth = Efficiency(matmul=0.62, matmul_half=40.0, attention=0.21, attention_backward=0.12, memory=0.45)
    bare = Device("test", {"f32": 5e10}, 1 << 30, 2e10, 1e10)
    noise = random.Random(0)
    timed = [
        Timed(k, kernel_seconds(replace(bare, efficiency=truth), k) * noise.uniform(0.97, 1.03)) for k in kernels()
    ]
    found = fit_device(bare, timed)
    for t in timed:
        assert kernel_seconds(found, t.kernel) == pytest.approx(t.seconds, rel=0.10)
    assert found.efficiency.attention == pytest.approx(0.21, rel=0.10)
    assert found.efficiency.memory == pytest.approx(0.45, rel=0.10)


def test_the_line_of_every_kind_of_collective_is_found_again() -> None:
    noise = random.Random(0)
    rates = dict(zip(KINDS, (1e9, 5e8, 2e8, 8e8), strict=True))
    sent = []
    for kind, rate in rates.items():
        for payload in SIZES:
            one = Sent(kind, 2, payload, 1.0)
            sent.append(replace(one, seconds=(2e-4 + one.moved / rate) * noise.uniform(0.97, 1.03)))
    tier = fit_tier(Tier("node", 2, 1.0, 0.0), sent)
    cluster = Cluster("measured", Device("test", {"f32": 1.0}, 1, 1.0, 1.0), (tier,))
    for s in sent:
        cost = message_cost(cluster, Mesh((("all", 2),)), ("all",), s.kind, s.payload)
        assert cost.seconds == pytest.approx(s.seconds, rel=0.12)
    assert tier.bandwidth == pytest.approx(1e9, rel=0.1)
    assert tier.efficiency_of("reduce-scatter") == pytest.approx(0.2, rel=0.15)


def test_groups_of_two_sizes_tell_what_a_hop_takes() -> None:
    truth = Tier("node", 8, 1e9, 5e-5, efficiency=1.0, overhead=1e-4)
    made = Cluster("true", Device("test", {"f32": 1.0}, 1, 1.0, 1.0), (truth,))
    sent = []
    for kind in KINDS:
        for members in (8, 2):
            mesh = Mesh((("other", 8 // members), ("group", members)))
            for payload in SIZES:
                seconds = message_cost(made, mesh, ("group",), kind, payload).seconds
                sent.append(Sent(kind, members, payload, seconds))
    tier = fit_tier(Tier("node", 8, 1.0, 0.0), sent)
    assert tier.latency == pytest.approx(5e-5, rel=0.15)
    assert tier.overhead_of("all-gather") == pytest.approx(1e-4, rel=0.25)


def test_measured_links_far_below_the_declared_ones_are_told() -> None:
    declared = read_cluster("h100x64")
    assert compare_declared(declared, declared) == []
    node, network = declared.tiers
    slow = replace(declared, tiers=(node, replace(network, bandwidth=network.bandwidth / 4)))
    (warning,) = compare_declared(declared, slow)
    assert warning.code == "W0410"
    assert "'infiniband'" in warning.message and "4.0 times slower" in warning.message
    # much faster ones are no fault
    fast = replace(declared, tiers=(node, replace(network, bandwidth=network.bandwidth * 4)))
    assert compare_declared(declared, fast) == []


def test_messages_of_a_run_are_compared_by_the_tier_that_they_cross() -> None:
    cluster, mesh = read_cluster("h100x64"), Mesh((("data", 8), ("tensor", 8)))
    expected = message_cost(cluster, mesh, ("tensor",), "all-gather", 1 << 26).seconds
    seen = [
        Observed(("tensor",), "all-gather", 1 << 26, 3 * expected),
        Observed(("tensor",), "all-gather", 1 << 26, 2 * expected),
        Observed(("data",), "all-gather", 1 << 26, 0.0),
    ]
    (warning,) = compare_observed(cluster, mesh, seen)
    assert "'nvlink'" in warning.message and "3.0 times slower" in warning.message
