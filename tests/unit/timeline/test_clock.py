"""What overlaps with what: small steps whose times can be computed by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from meshwright.compiler.prediction import Prediction
from meshwright.compiler.summary import Transfer, Wait
from meshwright.compiler.timeline import simulate
from tests.unit.timeline.steps import CLUSTER, gather, graph, item, kernel, on, step, took

A, B = kernel(3e-3), kernel(2e-3)


def parts(prediction: Prediction) -> float:
    """The sum of all parts of a step."""
    groups = (prediction.compute, prediction.exposed, prediction.other)
    return sum(sum(group.values()) for group in groups)


def test_kernels_follow_each_other() -> None:
    found = simulate(step(graph(A, B)), CLUSTER)
    assert found.seconds == pytest.approx(took(A, B))
    assert found.compute == pytest.approx({"elementwise": took(A, B)})


def test_the_stream_waits_at_once_for_a_synchronous_message() -> None:
    message = gather(1e-3)
    found = simulate(step(graph(A, message, B)), CLUSTER)
    assert found.seconds == pytest.approx(took(A, message, B))
    assert found.exposed == pytest.approx({"data": took(message)}) == found.communication


@pytest.mark.parametrize("seconds", [1e-3, 3e-3, 5e-3])
def test_of_an_asynchronous_message_what_compute_does_not_cover_is_exposed(seconds: float) -> None:
    message = gather(seconds, asynchronous=True)
    found = simulate(step(graph(message, A, Wait(0), B)), CLUSTER)
    exposed = max(0.0, took(message) - took(A))
    assert sum(found.exposed.values()) == pytest.approx(exposed, abs=1e-12)
    assert found.seconds == pytest.approx(took(A, B) + exposed)
    assert found.communication == pytest.approx({"data": took(message)})


def test_a_message_begins_when_the_stream_comes_to_it() -> None:
    message = gather(4e-3, asynchronous=True)
    found = simulate(step(graph(A, message, B, Wait(1))), CLUSTER)
    assert found.seconds == pytest.approx(took(A, message))


def test_messages_on_one_kind_of_link_take_turns_and_others_do_not() -> None:
    one, other = gather(4e-3, asynchronous=True), gather(4e-3, ("tensor",), asynchronous=True)
    same = simulate(step(graph(one, one, A, Wait(0), Wait(1))), CLUSTER)
    assert same.seconds == pytest.approx(2 * took(one))
    both = simulate(step(graph(one, other, A, Wait(0), Wait(1))), CLUSTER)
    assert both.seconds == pytest.approx(max(took(one), took(other)))
    assert both.communication == pytest.approx({"data": took(one), "tensor": took(other)})


def test_a_synchronous_message_takes_its_turn_behind_those_under_way() -> None:
    begun, needed = gather(6e-3, asynchronous=True), gather(1e-3)
    found = simulate(step(graph(begun, A, needed, B, Wait(0))), CLUSTER)
    assert found.seconds == pytest.approx(took(begun, needed, B))


def test_a_message_that_nobody_waits_for_ends_before_the_step_does() -> None:
    message = gather(5e-3, asynchronous=True)
    found = simulate(step(graph(A, message)), CLUSTER)
    assert found.seconds == pytest.approx(took(A, message))
    assert found.exposed == pytest.approx({"data": took(message)})


def test_a_message_waits_for_the_one_that_it_reads() -> None:
    first, second = gather(4e-3, asynchronous=True), gather(2e-3, ("tensor",), asynchronous=True)
    chained = graph(first, item(second, reads=[0]), Wait(1), Wait(0))
    assert simulate(step(chained), CLUSTER).seconds == pytest.approx(took(first, second))


def test_short_kernels_wait_for_the_host() -> None:
    short = kernel(1e-6)
    found = simulate(step(graph(*[short] * 10)), on(launch=5e-6))
    assert found.seconds == pytest.approx(10 * 5e-6 + took(short))
    assert found.other["launch"] == pytest.approx(found.seconds - took(*[short] * 10))
    assert parts(found) == pytest.approx(found.seconds)


def test_a_long_kernel_hides_the_launch_of_those_after_it() -> None:
    short, long = kernel(1e-6), kernel(1e-3)
    found = simulate(step(graph(long, *[short] * 10)), on(launch=5e-6))
    assert found.seconds == pytest.approx(5e-6 + took(long, *[short] * 10))


def test_on_a_host_every_launch_is_part_of_its_kernel() -> None:
    cluster = on(launch=5e-6)
    cluster = replace(cluster, device=replace(cluster.device, name="cpu"))
    found = simulate(step(graph(A, B)), cluster)
    assert found.seconds == pytest.approx(took(A, B) + 2 * 5e-6)
    assert found.other["launch"] == 0


def test_the_host_waits_for_the_loss_before_it_launches_the_update() -> None:
    long, short = kernel(1e-3), kernel(1e-6)
    found = simulate(step(graph(long), graph(short)), on(launch=5e-6))
    assert found.seconds == pytest.approx(5e-6 + took(long) + 5e-6 + took(short))


def test_transfers_run_on_the_stream_that_computes_and_beside_messages() -> None:
    message = gather(3e-3, asynchronous=True)
    works = graph(message, Transfer("to device", 4 * 10**7), A, Transfer("to host", 10**7), Wait(0))
    found = simulate(step(works), CLUSTER)
    assert found.seconds == pytest.approx(5e-3 + took(A))
    assert found.other["transfer"] == pytest.approx(5e-3)
    assert parts(found) == pytest.approx(found.seconds)


def test_kernels_are_slower_while_messages_are_under_way() -> None:
    message = gather(2e-3, asynchronous=True)
    found = simulate(step(graph(message, A, Wait(0))), on(contention=0.5))
    # beside the message, 2/3 of the work is done in its time
    assert found.seconds == pytest.approx(took(message) + took(A) - took(message) / 1.5)
    assert parts(found) == pytest.approx(found.seconds)
