"""For any step: no shorter than what one resource does, no longer than everything after everything else, and never
slower on faster links or devices."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.compiler.cluster.cluster import Cluster
from meshwright.compiler.mesh import Mesh
from meshwright.compiler.summary import GraphSummary, Item, Kernel, Message, RankSummary, Transfer, Wait
from meshwright.compiler.timeline import simulate
from tests.unit.timeline.steps import CLUSTER, EMPTY, gather, item, kernel, on, step, took

DURATIONS = st.sampled_from([1e-6, 1e-4, 1e-3, 4e-3])


@st.composite
def graphs(draw: st.DrawFn) -> GraphSummary:
    """Kernels, messages of both kinds, waits for some of them, and transfers."""
    items: list[Item] = []
    waiting: list[int] = []
    for _ in range(draw(st.integers(1, 12))):
        what = draw(st.sampled_from(["kernel", "kernel", "message", "begin", "wait", "transfer"]))
        axes = draw(st.sampled_from([("data",), ("tensor",)]))
        seconds = draw(DURATIONS)
        if what == "wait" and waiting:
            items.append(item(Wait(waiting.pop(draw(st.integers(0, len(waiting) - 1))))))
        elif what == "message":
            items.append(item(gather(seconds, axes)))
        elif what == "begin":
            waiting.append(len(items))
            items.append(item(gather(seconds, axes, asynchronous=True)))
        elif what == "transfer":
            items.append(item(Transfer(draw(st.sampled_from(["to device", "to host"])), int(seconds * 1e10))))
        else:
            items.append(item(kernel(seconds)))
    return GraphSummary(tuple(items), ())


def loads(summary: RankSummary, cluster: Cluster) -> dict[str, float]:
    """Seconds by resource."""
    found: dict[str, float] = {}
    graphs = (summary.prologue, *[summary.micro] * summary.microbatches, summary.update)
    for work in (i.work for g in graphs for i in g.items):
        if isinstance(work, Kernel):
            found["compute"] = found.get("compute", 0.0) + took(work, cluster=cluster)
            found["host"] = found.get("host", 0.0) + cluster.device.efficiency.launch
        elif isinstance(work, Message):
            name = ",".join(work.axes)
            found[name] = found.get(name, 0.0) + took(work, cluster=cluster)
            found["host"] = found.get("host", 0.0) + cluster.device.efficiency.launch
        elif isinstance(work, Transfer):
            found[work.direction] = found.get(work.direction, 0.0) + work.bytes / cluster.device.host_link
            found["host"] = found.get("host", 0.0) + cluster.device.efficiency.launch
    return found


@settings(max_examples=60, deadline=None)
@given(graphs(), graphs(), st.integers(1, 4), st.sampled_from([0.0, 2e-6, 5e-4]))
def test_time_is_between_the_busiest_resource_and_the_sum_of_all(
    micro: GraphSummary, update: GraphSummary, microbatches: int, launch: float
) -> None:
    cluster, summary = on(launch=launch), step(micro, update, microbatches=microbatches)
    found, alone = simulate(summary, cluster), loads(summary, cluster)
    slack = 1e-9
    assert max(alone.values(), default=0.0) - slack <= found.seconds <= sum(alone.values()) + slack
    parts = sum(sum(p.values()) for p in (found.compute, found.exposed, found.other))
    assert parts == pytest.approx(found.seconds, rel=1e-9, abs=1e-12)
    for axes, seconds in found.communication.items():
        assert seconds == pytest.approx(alone[axes])


@settings(max_examples=100, deadline=None)
@given(graphs(), st.integers(1, 3), st.sampled_from(["fast", "slow"]), st.floats(1.0, 8.0))
def test_a_faster_link_never_makes_a_step_slower(
    micro: GraphSummary, microbatches: int, name: str, factor: float
) -> None:
    summary = step(micro, microbatches=microbatches)
    tiers = tuple(replace(t, bandwidth=t.bandwidth * factor) if t.name == name else t for t in CLUSTER.tiers)
    assert simulate(summary, replace(CLUSTER, tiers=tiers)).seconds <= simulate(summary, CLUSTER).seconds + 1e-12


@settings(max_examples=100, deadline=None)
@given(graphs(), st.sampled_from([0.0, 1e-5]))
def test_a_faster_device_never_makes_a_step_slower(micro: GraphSummary, launch: float) -> None:
    cluster, summary = on(launch=launch), step(micro)
    faster = replace(cluster, device=replace(cluster.device, bandwidth=2e12, flops={"f32": 2e12}))
    assert simulate(summary, faster).seconds <= simulate(summary, cluster).seconds + 1e-12


def test_sixteen_thousand_ranks_are_one_by_symmetry() -> None:
    mesh = Mesh((("data", 2048), ("tensor", 8)))
    wide = replace(CLUSTER, tiers=tuple(replace(t, size=n) for t, n in zip(CLUSTER.tiers, (8, 2048), strict=True)))
    begun = gather(1e-3, asynchronous=True)
    micro = GraphSummary((item(begun), item(kernel(1e-3)), item(Wait(0))), ())
    summary = RankSummary(mesh, 4, EMPTY, micro, EMPTY, {}, model_flops=1e15, tokens=10**6)
    found = simulate(summary, wide)
    assert found.seconds == pytest.approx(4 * max(took(kernel(1e-3)), took(begun, cluster=wide, mesh=mesh)))
    assert found.tokens_per_second == pytest.approx(10**6 / found.seconds)
    assert found.mfu == pytest.approx(1e15 / (16384 * 1e12 * found.seconds))
