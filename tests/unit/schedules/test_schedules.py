"""Every schedule does everything once, comes to an end, and has the bubble and the memory that its authors give."""

from __future__ import annotations

from collections import Counter
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.compiler.schedules import catalogue
from meshwright.compiler.schedules.request import Costs, Request
from meshwright.compiler.schedules.simulate import Stuck, simulate
from meshwright.compiler.schedules.table import Action, Malformed, Schedule, parse_rows

NAMED = [name for name, module in catalogue.modules().items() if not getattr(module, "SEARCHED", False)]


def virtual_of(name: str) -> list[int]:
    module = catalogue.modules()[name]
    return [module.VIRTUAL] if getattr(module, "EXACT", False) else [1, 2, 3]


def made(name: str, ranks: int, microbatches: int, virtual: int | None = None, **more: object) -> Schedule:
    each = catalogue.modules()[name].VIRTUAL if virtual is None else virtual
    return catalogue.make(name, Request(ranks, microbatches, each, **more))  # type: ignore[arg-type]  # its fields


@pytest.mark.parametrize("name", NAMED)
def test_everything_is_done_once_and_comes_to_an_end(name: str) -> None:
    for ranks, virtual, count in product((2, 3, 4, 8, 16), virtual_of(name), (1, 2, 3, 7, 16, 64)):
        request = Request(ranks, count, virtual)
        if catalogue.why_not(name, request):
            continue
        complete(catalogue.make(name, request))


def complete(schedule: Schedule) -> None:
    """Every stage does every microbatch once, forward and backward, on the rank that holds it."""
    done: Counter[Action] = Counter()
    for rank in range(schedule.ranks):
        for action in schedule.actions(rank):
            assert schedule.rank(action) == rank
            kinds = ("I", "W") if action.kind == "B" else (action.kind,)
            done.update(Action(kind, action.stage, action.microbatch) for kind in kinds)
    every = product(("F", "I", "W"), range(schedule.stages), range(schedule.microbatches))
    assert done == Counter(Action(*one) for one in every)  # type: ignore[arg-type]  # kinds
    simulate(schedule)


COSTS = [Costs(), Costs(2.0, 2.0, 1.5), Costs(1.0, 1.25, 0.75)]


@pytest.mark.parametrize("costs", COSTS)
@pytest.mark.parametrize("p,m", [(2, 8), (4, 16), (8, 24)])
def test_bubbles_are_those_of_the_formulas(p: int, m: int, costs: Costs) -> None:
    f, i, w = costs.forward, costs.input, costs.weight
    each = f + i + w

    def lost(name: str, virtual: int | None = None) -> float:
        run = simulate(made(name, p, m, virtual), costs)
        return run.seconds - max(run.busy)

    assert lost("gpipe") == pytest.approx((p - 1) * each)
    assert lost("1f1b") == pytest.approx((p - 1) * each)
    assert simulate(made("1f1b", p, m), costs).bubble == pytest.approx((p - 1) / (m + p - 1))
    for v in (2, 3):
        # of m v passes through stages of 1/v the length, p - 1 are lost
        assert lost("interleaved", v) == pytest.approx((p - 1) * each)
        assert lost("breadth-first", v) == pytest.approx((p - 1) * each)
    assert lost("zb-h1") == pytest.approx((p - 1) * (f + i - w))
    run = simulate(made("zb-h2", p, m), costs)
    assert max(run.waits) == pytest.approx(max(0.0, (p - 1) * (f + i - 2 * w)))
    # the authors' formula, which takes a gradient of the input to last as long as a forward pass; longer ones lose less
    for name, steps in (("dualpipe", p / 2 - 1), ("dualpipe-v", p - 1)):
        expected = steps * (each + (i + w) - 3 * w)
        assert lost(name) <= expected + 1e-9
        if f == i:
            assert lost(name) == pytest.approx(expected)


@pytest.mark.parametrize("p,m", [(2, 8), (4, 16), (8, 24)])
def test_nothing_waits_in_zb_v_if_all_passes_take_the_same(p: int, m: int) -> None:
    assert max(simulate(made("zb-v", p, m)).waits) == 0.0


@pytest.mark.parametrize("p,m", [(2, 8), (4, 16), (8, 24)])
def test_what_is_held_is_that_of_the_formulas(p: int, m: int) -> None:
    def held(name: str, virtual: int | None = None) -> list[float]:
        return list(simulate(made(name, p, m, virtual)).peak)

    assert held("gpipe") == [m] * p
    assert held("1f1b") == [p - r for r in range(p)]
    for v in (2, 3):
        assert held("interleaved", v) == [min(v * m, p * (v - 1) + 2 * (p - r) - 1) for r in range(p)]
        assert held("breadth-first", v) == [v * m] * p
    assert held("zb-h1") == [p] * p
    assert held("zb-h2") == [2 * p - 1] * p
    assert held("zb-v") == [2 * p] * p
    assert held("dualpipe") == [p + 1] * p
    assert held("dualpipe-v") == [2 * p + 1] * p


def test_both_directions_of_dualpipe_hold_all_stages() -> None:
    schedule = made("dualpipe", 4, 10)
    assert schedule.placement == ((0, 1, 2, 3), (3, 2, 1, 0))
    assert schedule.stages_of(0) == ((0, 0), (1, 3))
    assert any(len(step) == 2 for step in schedule.rows[1]), "a forward and a backward pass side by side"


@given(
    ranks=st.integers(2, 6),
    count=st.integers(1, 12),
    virtual=st.integers(1, 2),
    values=st.tuples(*(st.floats(0.2, 3.0) for _ in range(3)), st.floats(0.0, 0.5), st.floats(0.2, 1.0)),
    memory=st.none() | st.integers(2, 12),
)
@settings(max_examples=40, deadline=None)
def test_the_list_scheduler_is_never_worse(
    ranks: int, count: int, virtual: int, values: tuple[float, ...], memory: int | None
) -> None:
    forward, input_, weight, send, kept = values
    costs = Costs(forward, input_, weight, send, kept=kept)
    request = Request(ranks, count, virtual, costs, None if memory is None else float(memory * virtual))
    found = catalogue.make("list", request)
    complete(found)
    run = simulate(found, costs)
    assert request.memory is None or max(run.peak) <= request.memory + 1e-9
    for other in catalogue.named(request):
        rival = simulate(other, costs)
        if len(other.placement) == 1 and (request.memory is None or max(rival.peak) <= request.memory):
            assert run.seconds <= rival.seconds * (1 + 1e-9), other.name


@pytest.mark.parametrize("name", NAMED)
def test_a_table_prints_and_parses(name: str) -> None:
    schedule = made(name, 4, 9)
    assert parse_rows(str(schedule)) == schedule.rows
    assert parse_rows("# what runs\n" + str(schedule) + "  # so it is\n\n") == schedule.rows


@pytest.mark.parametrize("text,line,column", [("0F0 0X1", 1, 5), ("0F0\n0F0+1", 2, 1), ("F0", 1, 1)])
def test_what_is_no_table_is_told_with_its_place(text: str, line: int, column: int) -> None:
    with pytest.raises(Malformed) as caught:
        parse_rows(text)
    assert (caught.value.line, caught.value.column) == (line, column)


def test_ranks_that_wait_for_one_another_are_told() -> None:
    rows = parse_rows("0F0 0B0 0F1 0B1\n1F1 1F0 1B0 1B1\n2F0 2F1 2B0 2B1")
    with pytest.raises(Stuck, match=r"^rank 0: 0B0 waits for 1I0; rank 1: 1F1 waits for 0F1$"):
        simulate(Schedule("own", ((0, 1, 2),), 2, rows))


def test_a_rank_that_waits_for_itself_is_told_alone() -> None:
    rows = parse_rows("0F0 0B0\n1B0 1F0")
    with pytest.raises(Stuck, match=r"^rank 1: 1B0 waits for 1F0$"):
        simulate(Schedule("own", ((0, 1),), 1, rows))
