"""What the communication library takes of its own counts as memory while a message is under way."""

from __future__ import annotations

from dataclasses import replace

import pytest

from meshwright.compiler.cluster.cluster import Cluster, Collective
from meshwright.compiler.summary import GraphSummary, Message, RankSummary, Wait
from meshwright.compiler.timeline import simulate
from tests.unit.timeline.steps import CLUSTER, EMPTY, MESH, graph, kernel

SIZE = 1 << 20


def cluster(**staging: float) -> Cluster:
    """The test cluster with bytes per byte of payload, on its slow tier alone."""
    given = tuple(Collective(kind.replace("_", "-"), 1.0, 0.0, share) for kind, share in staging.items())
    fast, slow = CLUSTER.tiers
    return replace(CLUSTER, tiers=(fast, replace(slow, collectives=given)))


def peak(micro: GraphSummary, on: Cluster) -> tuple[int, str]:
    summary = RankSummary(MESH, 1, EMPTY, micro, EMPTY, {"parameters": SIZE})
    found = simulate(summary, on).memory
    return found.peak, found.at.item


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_message_takes_its_share_until_it_is_there(asynchronous: bool) -> None:
    scatter = Message("reduce-scatter", ("data",), SIZE, asynchronous=asynchronous)
    works = (scatter, kernel(1e-3), Wait(0)) if asynchronous else (scatter, kernel(1e-3))
    assert peak(graph(*works), cluster())[0] == SIZE
    assert peak(graph(*works), cluster(reduce_scatter=1.5))[0] == SIZE + SIZE * 3 // 2
    assert peak(graph(*works), cluster(all_gather=1.0))[0] == SIZE


def test_what_passes_is_given_back_when_the_bytes_have_moved() -> None:
    two = [Message("all-gather", ("data",), SIZE, asynchronous=True) for _ in range(2)]
    together = graph(*two, Wait(0), Wait(1))
    fast, slow = CLUSTER.tiers
    for passing, copies in ((1.0, 1), (0.0, 2)):
        given = (Collective("all-gather", 1.0, 0.0, 1.0, passing=passing),)
        on = replace(CLUSTER, tiers=(fast, replace(slow, collectives=given)))
        assert peak(together, on)[0] == (1 + copies) * SIZE


def test_two_under_way_take_both() -> None:
    two = [Message("all-gather", ("data",), SIZE, asynchronous=True) for _ in range(2)]
    together = graph(*two, Wait(0), Wait(1))
    in_turn = graph(two[0], Wait(0), two[1], Wait(2))
    assert peak(together, cluster(all_gather=1.0))[0] == 3 * SIZE
    assert peak(in_turn, cluster(all_gather=1.0))[0] == 2 * SIZE


def test_only_the_tiers_that_are_crossed_count() -> None:
    inside = graph(Message("all-gather", ("tensor",), SIZE))
    assert peak(inside, cluster(all_gather=1.0))[0] == SIZE
