"""Pipelines of equal blocks: closed formulas for bubble and memory; where stages are cut."""

from __future__ import annotations

from dataclasses import replace

import pytest

from meshwright.compiler.diagnostics import MeshwrightError
from meshwright.compiler.mesh import Mesh
from meshwright.compiler.plan import PIPE
from meshwright.compiler.prediction import Execution, Prediction
from meshwright.compiler.schedules import catalogue
from meshwright.compiler.schedules.request import Request
from meshwright.compiler.summary import (
    PASSES,
    Border,
    Buffer,
    GraphSummary,
    Held,
    Item,
    Kept,
    StagedSummary,
)
from meshwright.compiler.timeline import staged as module
from meshwright.compiler.timeline.cuts import Depth, balanced, block_seconds, partition, shared_out
from meshwright.compiler.timeline.planned import Pipelined, Way, pipelined
from meshwright.compiler.timeline.stage import Shape, StagePricer
from meshwright.compiler.timeline.staged import costs_of, flowing
from tests.unit.timeline.steps import CLUSTER, EMPTY, kernel, took

FIRST, OTHER = "layers.0", "layers.1"
KEPT, WEIGHTS = 1000, 10**6
SECONDS = {"F": 1.0, "I": 1.0, "W": 1.0}


def summary(
    blocks: int, microbatches: int, *, head: float = 0.0, seconds: dict[str, float] | None = None
) -> StagedSummary:
    """A model of equal blocks, each of which takes so many milliseconds in each pass, keeps KEPT bytes from forward to
    backward and holds WEIGHTS; a head that belongs to the last block takes ``head`` more in each pass."""
    seconds = seconds or SECONDS

    def one(kind: str) -> GraphSummary:
        phase = "forward" if kind == "F" else "backward"
        blocks = (FIRST, OTHER) if kind == "F" else (OTHER, FIRST)
        items = [Item(kind, phase, b, kernel(seconds[kind] * 1e-3)) for b in blocks]  # type: ignore[arg-type]
        if head:
            items.append(Item("head", phase, "", kernel(head * 1e-3), home=OTHER))  # type: ignore[arg-type]
        kept = [Buffer(KEPT, "activations", i, len(items), "forward", b) for i, b in enumerate(blocks)]
        return GraphSummary(tuple(items), tuple(kept) if kind == "F" else ())

    return StagedSummary(
        mesh=Mesh((("data", 2),)),
        microbatches=microbatches,
        prologue=EMPTY,
        passes={kind: one(kind) for kind in PASSES},
        update=EMPTY,
        blocks=(FIRST, OTHER),
        groups=((FIRST, OTHER),),
        held=tuple(Held(WEIGHTS, "parameters", b) for b in (FIRST, OTHER)),
        kept=tuple(Kept(KEPT, "activations", "F", "I", b) for b in (FIRST, OTHER)),
        borders={OTHER: Border(0, 0)},
        repeats={OTHER: blocks - 1},
    )


def depth(blocks: int) -> Depth:
    return Depth(tuple(f"layers.{i}" for i in range(blocks)), (FIRST, *[OTHER] * (blocks - 1)))


def planned(name: str, pipe: int, microbatches: int, virtual: int = 1, blocks: int | None = None) -> Pipelined:
    count = blocks or pipe * virtual
    pricer = StagePricer(summary(count, microbatches), CLUSTER, Execution())
    return pipelined([pricer], depth(count), Way(Mesh(((PIPE, pipe), ("data", 2))), name, virtual))


def bubble(found: Prediction) -> float:
    assert found.flow is not None
    return found.flow.bubble


@pytest.mark.parametrize("pipe", [2, 4, 8])
@pytest.mark.parametrize("microbatches", [8, 16, 40])
def test_the_bubble_of_equal_stages(pipe: int, microbatches: int) -> None:
    p, m = pipe, microbatches
    share = (p - 1) / (m + p - 1)
    assert bubble(planned("1f1b", p, m).prediction) == pytest.approx(share, rel=1e-3)
    assert bubble(planned("gpipe", p, m).prediction) == pytest.approx(share, rel=1e-3)
    if m % p == 0:
        v = 2
        deeper = (p - 1) / (v * m + p - 1)
        assert bubble(planned("interleaved", p, m, v).prediction) == pytest.approx(deeper, rel=1e-3)
    # ZB-H1 waits (p-1)(F+I-W) of (m (F+I+W) + ...)
    late = (p - 1) / (3 * m + p - 1)
    assert bubble(planned("zb-h1", p, m).prediction) == pytest.approx(late, rel=1e-3)


def test_times_add_up_to_the_step() -> None:
    found = planned("1f1b", 4, 8, blocks=8).prediction
    unit = took(kernel(1e-3))
    assert found.compute["elementwise"] == pytest.approx(8 * 2 * 3 * unit, rel=1e-6)
    assert found.seconds == pytest.approx((8 + 3) * 2 * 3 * unit, rel=1e-3)
    causes = sum(found.compute.values()) + sum(found.exposed.values()) + sum(found.other.values())
    assert causes == pytest.approx(found.seconds, rel=1e-6)


@pytest.mark.parametrize(("name", "most"), [("1f1b", 4), ("gpipe", 16), ("zb-h1", 4), ("zb-h2", 7)])
def test_what_the_fullest_rank_holds(name: str, most: int) -> None:
    found = planned(name, 4, 16, blocks=8).prediction
    assert found.flow is not None
    assert found.memory.by_kind["parameters"] == 2 * WEIGHTS
    # nothing is kept for the gradients of the weights, so that less is held than there are microbatches under way
    flying = {"zb-h1": 4, "zb-h2": 7}.get(name, most)
    assert found.memory.by_kind["activations"] == flying * 2 * KEPT
    assert max(s.in_flight for s in found.flow.stages) == most
    assert found.flow.fullest == 0


def test_very_many_microbatches_take_what_they_would(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, virtual in (("1f1b", 1), ("interleaved", 2), ("zb-v", 2), ("zb-h2", 1)):
        exact = planned(name, 4, 240, virtual, blocks=12).prediction
        with monkeypatch.context() as patch:
            patch.setattr(module, "LONG", 100)
            short = planned(name, 4, 240, virtual, blocks=12).prediction
        assert short.seconds == pytest.approx(exact.seconds, rel=1e-6)
        assert short.memory.peak == exact.memory.peak


def test_uneven_costs_many_microbatches(monkeypatch: pytest.MonkeyPatch) -> None:
    pricer = StagePricer(summary(12, 100, head=1.5), CLUSTER, Execution())
    uses = [pricer(shape) for shape in depth(12).shapes((0, 3, 6, 9))]
    costs = costs_of(uses, 1e-4)
    for name in ("1f1b", "zb-h1", "gpipe"):
        exact = flowing(lambda m, name=name: catalogue.make(name, Request(4, m, 1, costs)), costs, 100, 4)
        monkeypatch.setattr(module, "LONG", 100)
        short = flowing(lambda m, name=name: catalogue.make(name, Request(4, m, 1, costs)), costs, 100, 4)
        monkeypatch.undo()
        assert short.seconds == pytest.approx(exact.seconds, rel=1e-6), name


def test_the_searched_schedule_comes_with_its_table() -> None:
    found = planned("list", 2, 4)
    assert found.pipeline.table.count("\n") == 1 and "0F0" in found.pipeline.table
    assert bubble(found.prediction) <= bubble(planned("1f1b", 2, 4).prediction) + 1e-9


def test_too_many_stages_are_refused() -> None:
    with pytest.raises(MeshwrightError, match="8 stages cannot be made of 6"):
        planned("1f1b", 8, 8, blocks=6)


def test_a_heavy_head_takes_blocks_from_the_last_stage() -> None:
    pricer = StagePricer(summary(16, 8, head=2.0), CLUSTER, Execution())
    assert block_seconds(depth(16), pricer)[-1] == pytest.approx(3 * block_seconds(depth(16), pricer)[0], rel=1e-3)
    starts = balanced(depth(16), pricer, (0, 1, 2, 3))
    assert starts == (0, 5, 9, 14) or [b - a for a, b in zip(starts, (*starts[1:], 16), strict=True)][-1] == 2


def test_partition() -> None:
    assert partition([1.0] * 8, 4) == (0, 2, 4, 6)
    assert partition([1.0] * 8 + [4.0], 3) == (0, 4, 8)
    assert partition([5.0, 1.0, 1.0, 1.0], 2) == (0, 1)
    assert partition([1.0], 1) == (0,)
    with pytest.raises(ValueError, match="2 blocks"):
        partition([1.0, 1.0], 3)


def test_the_best_partition_is_found() -> None:
    """Against trying all."""
    from itertools import combinations

    costs = [3.0, 1.0, 4.0, 1.0, 5.0, 9.0, 2.0, 6.0, 5.0, 3.0]
    for parts in range(1, 6):
        all_of_them = [(0, *more) for more in combinations(range(1, len(costs)), parts - 1)]

        def longest(starts: tuple[int, ...]) -> float:
            return max(sum(costs[a:b]) for a, b in zip(starts, (*starts[1:], len(costs)), strict=True))

        assert longest(partition(costs, parts)) == min(map(longest, all_of_them))


def test_blocks_are_shared_out_by_rank() -> None:
    down_and_up = (0, 1, 1, 0)
    starts = shared_out([1.0] * 7 + [2.0], down_and_up)
    sizes = [b - a for a, b in zip(starts, (*starts[1:], 8), strict=True)]
    loads = dict.fromkeys(down_and_up, 0.0)
    for rank, size in zip(down_and_up, sizes, strict=True):
        loads[rank] += size
    assert loads == {0: 4.0, 1: 4.0} or max(loads[0] + 1, loads[1]) == 5.0
    assert sum(sizes) == 8 and min(sizes) >= 1


def test_shapes_take_the_homes_at_their_ends() -> None:
    four = depth(4)
    assert four.shapes((0, 2)) == [
        Shape(((FIRST, 1), (OTHER, 1)), frozenset({FIRST})),
        Shape(((OTHER, 2),), frozenset({OTHER})),
    ]
    assert replace(four).starts(("layers.3",)) == (0, 3)


def test_stages_recompute_only_where_they_must() -> None:
    """Of 1F1B the first ranks hold most: they alone give up what they keep, and get fewer blocks for it."""
    plain = StagePricer(summary(16, 16), CLUSTER, Execution())
    again = summary(16, 16, seconds={"F": 1.0, "I": 2.0, "W": 1.0})
    again = replace(again, kept=tuple(replace(k, bytes=KEPT // 10) for k in again.kept))
    light = StagePricer(again, CLUSTER, Execution())
    mesh = Mesh(((PIPE, 4), ("data", 2)))
    free = pipelined([plain, light], depth(16), Way(mesh, "1f1b"))
    assert free.levels == (0, 0, 0, 0)
    assert free.prediction.flow is not None
    room = sorted(free.prediction.flow.memory)[2]  # enough for the last three
    tight = pipelined([plain, light], depth(16), Way(mesh, "1f1b", room=room))
    assert tight.levels[0] == 1 and tight.levels[1:] == (0, 0, 0)
    assert tight.prediction.memory.peak <= room
    assert tight.prediction.flow is not None
    everywhere = pipelined([light], depth(16), Way(mesh, "1f1b")).prediction
    assert free.prediction.seconds < tight.prediction.seconds < everywhere.seconds
    assert tight.prediction.flow.stages[0].blocks <= 4
    none = pipelined([plain, light], depth(16), Way(mesh, "1f1b", room=1.0))
    assert none.levels == (1, 1, 1, 1), "what does not fit at all does what it can"


def test_the_searched_schedule_keeps_to_the_room() -> None:
    pricer = StagePricer(summary(8, 12), CLUSTER, Execution())
    mesh = Mesh(((PIPE, 4), ("data", 2)))
    free = pipelined([pricer], depth(8), Way(mesh, "list")).prediction
    # gradients of weights fill all gaps; what is left is the last rank's wait for the first microbatch
    assert bubble(free) == pytest.approx(3 / (3 * 12 + 3), rel=1e-3)
    room = pipelined([pricer], depth(8), Way(mesh, "1f1b")).prediction.memory.peak
    tight = pipelined([pricer], depth(8), Way(mesh, "list", room=room)).prediction
    assert tight.memory.peak <= room
    assert tight.seconds <= pipelined([pricer], depth(8), Way(mesh, "zb-h1")).prediction.seconds * (1 + 1e-9)
