"""What a communication library takes: memory of its own, and calls that take longer the more ranks there are."""

from __future__ import annotations

import math

import pytest

from meshwright.compiler.cluster.cluster import MOST_GROWTH, Cluster, Collective, Tier
from meshwright.compiler.cluster.cluster_file import read_cluster
from meshwright.compiler.cluster.collectives import message_cost, message_staging
from meshwright.compiler.cluster.device import Device
from meshwright.compiler.cluster.fitting import Sent, fit_tier
from meshwright.compiler.cluster.writer import cluster_to_toml
from meshwright.compiler.mesh import Mesh
from meshwright.compiler.summary import MessageKind

KINDS: tuple[MessageKind, ...] = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all")
DEVICE = Device("test", {"f32": 1e10}, 1 << 30, 1e10, 1e10)


def on(tier: Tier) -> Cluster:
    return Cluster("test", DEVICE, (tier,))


def mesh(members: int) -> Mesh:
    return Mesh((("other", 8 // members), ("group", members)))


def sent(truth: Cluster, staging: dict[str, float]) -> list[Sent]:
    found = []
    for kind in KINDS:
        for members in (2, 8):
            for payload in (1 << 12, 1 << 17, 1 << 21, 1 << 24):
                seconds = message_cost(truth, mesh(members), ("group",), kind, payload).seconds
                found.append(Sent(kind, members, payload, seconds, int(payload * staging.get(kind, 0.0))))
    return found


def test_growth_and_staging_are_found_again() -> None:
    growing = tuple(
        Collective(kind, 1.0, 5e-4, growth=power) for kind, power in zip(KINDS, (1.8, 0.7, 1.5, 0.0), strict=True)
    )
    truth = on(Tier("node", 8, 1e9, 0.0, 1.0, collectives=growing))
    found = fit_tier(Tier("node", 8, 1.0, 0.0), sent(truth, {"all-gather": 1.0, "reduce-scatter": 2.0}))
    for kind in KINDS:
        for members in (2, 8):
            for payload in (1 << 12, 1 << 20):
                wanted = message_cost(truth, mesh(members), ("group",), kind, payload).seconds
                assert message_cost(on(found), mesh(members), ("group",), kind, payload).seconds == pytest.approx(
                    wanted, rel=0.15
                )
    assert [found.staging_of(kind) for kind in KINDS] == [0.0, 1.0, 2.0, 0.0]


def test_an_overhead_grows_with_the_members_of_the_tier() -> None:
    grows = on(Tier("node", 8, 1e9, 0.0, 1.0, collectives=(Collective("all-gather", 1.0, 1e-3, growth=2.0),)))
    two, eight = (message_cost(grows, mesh(n), ("group",), "all-gather", 0).seconds for n in (2, 8))
    assert two == pytest.approx(1e-3)
    assert eight == pytest.approx(49e-3)


def test_both_are_written_and_read_back() -> None:
    tier = Tier("node", 8, 1e9, 1e-5, collectives=(Collective("all-gather", 0.5, 1e-3, 1.0, 1.25, 0.75),))
    text = cluster_to_toml(on(tier))
    assert "staging = 1, passing = 0.75, growth = 1.25" in text
    (read,) = read_cluster(text).tiers
    assert read.collectives == tier.collectives
    assert message_staging(on(read), mesh(8), ("group",), "all-gather", 1000) == (250, 750)
    assert message_staging(on(read), mesh(8), ("group",), "all-reduce", 1000) == (0, 0)
    assert math.isclose(read.overhead_of("all-gather", 5), 1e-3 * 4**1.25)


def test_what_noise_lets_grow_too_fast_can_still_be_read() -> None:
    """Small messages of the large group that were held up, and of pairs whose line goes through the origin."""
    found = []
    for kind in KINDS:
        found += [Sent(kind, 2, size, size * 1e-9 + 1e-6) for size in (1 << 12, 1 << 17, 1 << 21)]
        found += [Sent(kind, 4, size, 0.5 + size * 1e-9) for size in (1 << 12, 1 << 17, 1 << 21)]
    tier = fit_tier(Tier("node", 4, 1.0, 0.0), found)
    assert read_cluster(cluster_to_toml(on(tier))).tiers == (tier,)
    assert max(c.growth for c in tier.collectives) == MOST_GROWTH
