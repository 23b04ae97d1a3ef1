"""Repeated blocks: a folded step takes the time of the whole one, with everything begun ahead and waited for late."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest

from meshwright.compiler.summary import GraphSummary, Item, Wait
from meshwright.compiler.timeline import simulate
from meshwright.compiler.timeline.order import stretches
from tests.unit.timeline.steps import CLUSTER, Work, gather, item, kernel, on, step

PREFETCHED = 5e-3


def deep(layers: int, *, ahead: int, seconds: float = PREFETCHED) -> GraphSummary:
    """Forward and backward of so many layers. Each gathers its weights before use, ``ahead`` layers earlier, and in
    backward reduces gradients, which are waited for where the next layer reduces its own."""
    items: list[Item] = []
    begun: dict[tuple[str, int], int] = {}

    def add(work: Work, block: str, phase: str) -> int:
        items.append(item(work, (), block, phase))
        return len(items) - 1

    def begin(what: str, layer: int, phase: str) -> None:
        if 0 <= layer < layers:
            begun[what, layer] = add(gather(seconds, asynchronous=True), f"layers.{layer}", phase)

    def wait(what: str, layer: int, phase: str) -> None:
        if (what, layer) in begun:
            add(Wait(begun[what, layer]), f"layers.{layer}", phase)

    for layer in range(ahead):
        begin("weights", layer, "forward")
    add(kernel(1e-3), "", "forward")
    for layer in range(layers):
        begin("weights", layer + ahead, "forward")
        wait("weights", layer, "forward")
        add(kernel(3e-3, "up"), f"layers.{layer}", "forward")
        add(gather(1e-3, ("tensor",)), f"layers.{layer}", "forward")
        add(kernel(1e-3, "down"), f"layers.{layer}", "forward")
    add(kernel(2e-3), "", "forward")
    add(kernel(2e-3), "", "backward")
    for layer in range(layers - 1, layers - 1 - ahead, -1):
        begin("again", layer, "backward")
    for layer in reversed(range(layers)):
        begin("again", layer - ahead, "backward")
        wait("again", layer, "backward")
        add(kernel(6e-3, "up"), f"layers.{layer}", "backward")
        wait("gradients", layer + 1, "backward")
        begin("gradients", layer, "backward")
        add(kernel(2e-3, "down"), f"layers.{layer}", "backward")
    add(kernel(1e-3), "", "backward")
    wait("gradients", 0, "backward")
    return GraphSummary(tuple(items), ())


def in_two_steps(layers: int, seconds: float) -> GraphSummary:
    """Backward of so many layers, whose gradients are reduced over one axis while the next layer is computed, and then
    over another one while the layer after that is."""
    items: list[Item] = []
    begun: dict[tuple[str, int], int] = {}

    def add(work: Work, layer: int | None) -> int:
        items.append(item(work, (), "" if layer is None else f"layers.{layer}", "backward"))
        return len(items) - 1

    def pay(layer: int) -> None:
        """Go on with the gradients of the layers before."""
        if ("near", layer + 1) in begun:
            add(Wait(begun["near", layer + 1]), layer + 1)
            begun["far", layer + 1] = add(gather(seconds, asynchronous=True), layer + 1)
        if ("far", layer + 2) in begun:
            add(Wait(begun["far", layer + 2]), layer + 2)

    for layer in range(layers):
        items.append(item(kernel(3e-3), (), f"layers.{layer}", "forward"))
    add(kernel(1e-3), None)
    for layer in reversed(range(layers)):
        add(kernel(6e-3, "up"), layer)
        pay(layer)
        begun["near", layer] = add(gather(1e-4, ("tensor",), asynchronous=True), layer)
        add(kernel(2e-3, "down"), layer)
    add(kernel(1e-3), None)
    pay(-1)
    pay(-2)
    return GraphSummary(tuple(items), ())


@pytest.mark.parametrize("seconds", [1e-3, 7e-3])
def test_what_is_waited_for_two_layers_later_is_hidden(seconds: float) -> None:
    folded = simulate(step(in_two_steps(2, seconds), repeats={"layers.1": 31}), on())
    whole = simulate(step(in_two_steps(32, seconds)), on())
    assert folded.seconds == pytest.approx(whole.seconds, rel=0.01)
    # of the last layers alone, nothing is left to compute meanwhile
    assert sum(whole.exposed.values()) < 3 * seconds


@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize("seconds", [1e-3, 5e-3, 9e-3])
@pytest.mark.parametrize("launch", [1e-6, 2e-3])
@pytest.mark.parametrize("layers", [3, 4, 12, 126])
def test_a_folded_step_takes_the_time_of_the_whole_one(ahead: int, seconds: float, launch: float, layers: int) -> None:
    folded = step(deep(2, ahead=ahead, seconds=seconds), repeats={"layers.1": layers - 1})
    whole = step(deep(layers, ahead=ahead, seconds=seconds))
    quick, slow = simulate(folded, on(launch=launch)), simulate(whole, on(launch=launch))
    assert quick.seconds == pytest.approx(slow.seconds, rel=1e-9)
    for group in ("compute", "exposed", "communication", "other"):
        assert getattr(quick, group) == pytest.approx(getattr(slow, group), rel=1e-9, abs=1e-9)
    assert simulate(folded, on(launch=launch), exact=True).seconds == pytest.approx(quick.seconds, rel=1e-9)


def test_gathering_two_ahead_is_near_the_whole_step() -> None:
    folded, whole = step(deep(2, ahead=2), repeats={"layers.1": 31}), step(deep(32, ahead=2))
    assert simulate(folded, CLUSTER).seconds == pytest.approx(simulate(whole, CLUSTER).seconds, rel=5e-3)


@pytest.mark.parametrize("ahead", [0, 1, 2])
@pytest.mark.parametrize("count", [1, 2, 3, 9])
def test_every_item_runs_as_often_as_its_block_comes(ahead: int, count: int) -> None:
    graph = deep(2, ahead=ahead)
    counts = Counter(p for s in stretches(graph.items, {"layers.1": count}) for round_ in s.sequence() for p in round_)
    assert counts == {p: count if i.block == "layers.1" else 1 for p, i in enumerate(graph.items)}


def order(names: list[str], repeats: dict[str, int]) -> list[str]:
    """The blocks of one kernel each in the order in which they run."""
    items = [item(kernel(1e-3, name.partition(":")[2] or "same"), (), name.partition(":")[0]) for name in names]
    return [names[p] for s in stretches(items, repeats) for round_ in s.sequence() for p in round_]


def test_kinds_of_blocks_that_take_turns_do_so_in_every_round() -> None:
    names = ["layers.0:a", "layers.1:b", "layers.2:a", "layers.3:b"]
    found = order(names, {"layers.2": 3, "layers.3": 3})
    assert found == [*names[:2], *(names[2:] * 3)]


def test_blocks_within_blocks_and_several_kinds() -> None:
    names = ["a.0.x.0:p", "a.0.x.1:q", "a.1.x.0:p", "a.1.x.1:q", "b.0:r", "b.1:r"]
    repeats = {"a.1": 2, "a.1.x.0": 2, "a.1.x.1": 2, "b.1": 4}
    assert order(names, repeats) == [*names[:2], *(names[2:4] * 2), names[4], *[names[5]] * 4]


def test_blocks_with_nothing_like_them() -> None:
    assert order(["layers.0:a", "layers.1:b", ":c"], {"layers.1": 3}) == ["layers.0:a", *["layers.1:b"] * 3, ":c"]


def update() -> Iterator[Item]:
    for layer in range(2):
        yield item(kernel(1e-3, "norm"), [-1], f"layers.{layer}", "update")
    yield item(kernel(1e-3, "total"), [0, 1], "", "update")
    for layer in range(2):
        yield item(kernel(1e-3, "step"), [-1, 2], f"layers.{layer}", "update")


def test_an_update_goes_through_the_blocks_twice() -> None:
    items = list(update())
    found = [p for s in stretches(items, {"layers.1": 3}) for round_ in s.sequence() for p in round_]
    assert found == [0, 1, 1, 1, 2, 3, 4, 4, 4]


def test_casts_of_all_weights_at_the_start_are_a_pass_of_their_own() -> None:
    items = [
        *(item(kernel(1e-3, "cast"), [-1], f"layers.{n}") for n in (0, 1)),
        item(kernel(1e-3, "embed"), [-1]),
        *(item(kernel(1e-3, "mm"), [n, 2 + n], f"layers.{n}") for n in (0, 1)),
    ]
    found = [p for s in stretches(items, {"layers.1": 3}) for round_ in s.sequence() for p in round_]
    assert found == [0, 1, 1, 1, 2, 3, 4, 4, 4]


def test_casts_for_gathers_that_are_begun_with_them_stay_with_these() -> None:
    begun = gather(1e-3, asynchronous=True)
    items = [
        item(kernel(1e-4, "cast"), [-1], "layers.0"),
        item(begun, [0], "layers.0"),
        item(kernel(1e-4, "cast"), [-1], "layers.1"),
        item(begun, [2], "layers.1"),
        item(kernel(1e-3, "embed"), [-1]),
        item(Wait(1), [1], "layers.0"),
        item(kernel(1e-3, "mm"), [4, 5], "layers.0"),
        item(Wait(3), [3], "layers.1"),
        item(kernel(1e-3, "mm"), [6, 7], "layers.1"),
    ]
    found = [p for s in stretches(items, {"layers.1": 3}) for round_ in s.sequence() for p in round_]
    assert found == [0, 1, 2, 3, 4, 5, 6, 2, 3, 7, 8, 2, 3, 7, 8, 7, 8]
