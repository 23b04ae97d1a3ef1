"""Microbatches: each takes its time, gradients are added up, and those in the middle need not be gone through."""

from __future__ import annotations

from dataclasses import replace

import pytest

from meshwright.compiler.prediction import Execution
from meshwright.compiler.summary import Buffer, Kernel, Wait
from meshwright.compiler.timeline import simulate
from tests.unit.timeline.steps import CLUSTER, gather, graph, kernel, on, step, took

A, B = kernel(3e-3), kernel(2e-3)


def test_microbatches_follow_each_other() -> None:
    assert simulate(step(graph(A, B), microbatches=7), CLUSTER).seconds == pytest.approx(7 * took(A, B))


@pytest.mark.parametrize("launch", [0.0, 1e-6, 4e-4, 1e-3, 5e-3])
@pytest.mark.parametrize("microbatches", [1, 2, 3, 4, 40])
def test_going_through_all_of_them_gives_the_same(launch: float, microbatches: int) -> None:
    micro = graph(gather(4e-3, asynchronous=True), kernel(1e-4), kernel(1e-4), A, Wait(0), B, gather(1e-3, ("tensor",)))
    one = step(micro, graph(B), microbatches=microbatches)
    quick, exact = (simulate(one, on(launch=launch), exact=e) for e in (False, True))
    assert quick.seconds == pytest.approx(exact.seconds, rel=1e-9)
    for group in ("compute", "exposed", "communication", "other"):
        assert getattr(quick, group) == pytest.approx(getattr(exact, group), rel=1e-9, abs=1e-12)


def test_gradients_are_added_up_after_all_but_the_first() -> None:
    micro = replace(graph(A), buffers=(Buffer(1000, "gradients", 0, 1, "backward", ""),))
    found = simulate(step(micro, microbatches=3, accumulators=2000), CLUSTER)
    adding = Kernel("accumulate", "elementwise", 0.0, 3000, 2000)
    assert found.seconds == pytest.approx(3 * took(A) + 2 * took(adding))
    by_hand = simulate(step(micro, microbatches=3, accumulators=2000), CLUSTER, Execution("kernels"))
    assert by_hand.seconds == pytest.approx(3 * took(A) + 2 * took(replace(adding, read=2000, written=1000)))
