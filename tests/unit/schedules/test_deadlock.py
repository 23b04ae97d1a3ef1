"""Programs of ranks: those of schedules come to an end, what is wrong with others is told."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, replace
from itertools import product

import pytest

from meshwright.compiler.schedules import catalogue
from meshwright.compiler.schedules.deadlock import check
from meshwright.compiler.schedules.instructions import (
    Collective,
    Compute,
    Exchange,
    Instruction,
    Program,
    Transfer,
    Wait,
)
from meshwright.compiler.schedules.lower import neighbours, programs
from meshwright.compiler.schedules.request import Costs, Request
from meshwright.compiler.schedules.simulate import Stuck
from tests.unit.schedules.executor import Executor
from tests.unit.schedules.mutations import MUTATIONS, swap

NAMES = list(catalogue.modules())


def of(name: str, ranks: int, microbatches: int, costs: Costs | None = None, size: int = 0) -> tuple[Program, ...]:
    request = Request(ranks, microbatches, catalogue.modules()[name].VIRTUAL, costs or Costs())
    return programs(catalogue.make(name, request), costs, lambda made, target: (size, size))


@pytest.mark.parametrize("name", NAMES)
def test_programs_of_schedules_come_to_an_end(name: str) -> None:
    most = 16 if name == "list" else 64
    counts = [(ranks, count) for ranks in range(2, 17) for count in (1, 5, min(ranks, most))]
    for ranks, count in (*counts, (2, most), (3, most), (8, most), (16, most)):
        if not catalogue.why_not(name, Request(ranks, count, catalogue.modules()[name].VIRTUAL)):
            for costs in (Costs(), Costs(1.0, 1.3, 0.7, 0.1)):
                assert check(of(name, ranks, count, costs)) == []


def test_values_that_many_stages_read() -> None:
    """What the first stage makes goes to all others, and gradients from all of them to it."""
    for name in NAMES:
        for ranks, count in product((2, 4), (2, 6)):
            request = Request(ranks, count, catalogue.modules()[name].VIRTUAL)
            if catalogue.why_not(name, request):
                continue
            schedule = catalogue.make(name, request)
            links = dict(neighbours(schedule.stages))
            for stage in range(2, schedule.stages):
                links[stage, "F"] = (*links[stage, "F"], (0, "F"))
            links[0, "I"] = tuple((stage, "I") for stage in range(1, schedule.stages))
            found = programs(schedule, links=links)
            assert check(found) == []
            assert Executor(found, ranks).run()


def test_tables_that_come_to_an_end_make_programs_that_do() -> None:
    """Whatever the order in a table that somebody has written."""
    choose = random.Random(4)
    made = 0
    while made < 200:
        schedule = catalogue.make(
            choose.choice(("1f1b", "zb-h1", "gpipe")), Request(choose.randint(2, 4), choose.randint(2, 5))
        )
        rows = [list(row) for row in schedule.rows]
        for _ in range(choose.randint(1, 6)):
            row = choose.choice(rows)
            at = choose.randrange(len(row) - 1)
            row[at], row[at + 1] = row[at + 1], row[at]
        edited = replace(schedule, rows=tuple(map(tuple, rows)))
        try:
            found = programs(edited)
        except Stuck:
            continue
        made += 1
        assert check(found) == []


def send(value: str, peer: int, size: int = 0) -> Exchange:
    return Exchange((Transfer(True, peer, value, size),))


def receive(value: str, peer: int, size: int = 0) -> Exchange:
    return Exchange((Transfer(False, peer, value, size),))


def make(value: str) -> Compute:
    return Compute(f"make {value}", (), (value,))


def test_ranks_that_both_send_first_wait_for_one_another() -> None:
    one = (make("a"), send("a", 1), receive("b", 1), Wait("a"), Wait("b"))
    other = (make("b"), send("b", 0), receive("a", 0), Wait("b"), Wait("a"))
    (fault,) = check([one, other])
    assert fault.kind == "deadlock"
    assert "rank 0, at instruction 3 (wait a), waits in instruction 1 (send a > 1) for rank 1" in fault.message
    assert "rank 1, at instruction 3 (wait b), waits in instruction 1 (send b > 0) for rank 0" in fault.message
    together = tuple(
        (make(mine), Exchange((Transfer(True, peer, mine), Transfer(False, peer, its))), Wait(mine), Wait(its))
        for mine, its, peer in (("a", "b", 1), ("b", "a", 0))
    )
    assert check(together) == []


def test_a_ring_is_told_with_all_its_ranks() -> None:
    ring = [
        (make(f"v{r}"), send(f"v{r}", (r + 1) % 5), receive(f"v{(r - 1) % 5}", (r - 1) % 5), Wait(f"v{r}"))
        for r in range(5)
    ]
    ring = [(*program, Wait(f"v{(r - 1) % 5}")) for r, program in enumerate(ring)]
    (fault,) = check(ring)
    assert fault.kind == "deadlock" and all(f"rank {r}, at" in fault.message for r in range(5))


def test_groups_that_are_made_in_another_order() -> None:
    """Both collectives could run beside one another, but a communicator is made when it is first used."""
    small, large = Collective((0, 1), "all_reduce f32 8", "a"), Collective((0, 1, 2), "all_reduce f32 8", "b")
    first = (make("a"), make("b"), small, large, Wait("a"), Wait("b"))
    second = (make("a"), make("b"), large, small, Wait("a"), Wait("b"))
    third = (make("b"), large, Wait("b"))
    (fault,) = check([first, second, third])
    assert fault.kind == "deadlock" and "the first use of its group" in fault.message
    assert check([first, first, third]) == []


def test_collectives_that_do_not_agree() -> None:
    def program(signature: str) -> Program:
        return make("a"), Collective((0, 1, 2), signature, "a"), Wait("a")

    (fault,) = check([program("all_reduce f32 8"), program("all_reduce f32 9"), program("all_reduce f32 8")])
    assert fault.kind == "unmatched" and fault.rank == 1 and "all_reduce f32 9" in fault.message
    (fault,) = check([program("all_reduce f32 8"), (make("a"),), program("all_reduce f32 8")])
    assert fault.kind == "unmatched" and fault.rank == 1 and "calls nothing" in fault.message


@dataclass(frozen=True)
class Meeting:
    """A collective of some ranks, or a message from the first of two to the second."""

    name: str
    ranks: tuple[int, ...]
    collective: bool

    def begun_by(self, rank: int) -> Instruction:
        if self.collective:
            return Collective(self.ranks, "all_reduce(sum) f32 8", self.name)
        source, target = self.ranks
        return send(self.name, target) if rank == source else receive(self.name, source)


def at_random(choose: random.Random) -> list[Program]:
    """Programs of a few ranks, which come to the same meetings, each in an order of its own that is almost the same."""
    ranks = choose.randint(2, 4)
    meetings = []
    for number in range(choose.randint(2, 6)):
        collective = choose.random() < 0.5
        members = choose.sample(range(ranks), choose.randint(2, ranks) if collective else 2)
        meetings.append(Meeting(f"m{number}", tuple(sorted(members) if collective else members), collective))
    found = []
    for rank in range(ranks):
        mine = [meeting for meeting in meetings if rank in meeting.ranks]
        if len(mine) > 1 and choose.random() < 0.5:
            at = choose.randrange(len(mine) - 1)
            mine[at], mine[at + 1] = mine[at + 1], mine[at]
        program: list[Instruction] = [
            Compute("make", (), tuple(m.name for m in mine if m.collective or m.ranks[0] == rank))
        ]
        open_: list[str] = []
        for meeting in mine:
            program.append(meeting.begun_by(rank))
            open_.append(meeting.name)
            while open_ and choose.random() < 0.6:
                program.append(Wait(open_.pop(choose.randrange(len(open_)))))
        found.append((*program, *map(Wait, open_)))
    return found


def test_what_is_told_is_what_happens() -> None:
    """Small programs with many deadlocks: the check and executions in random order agree on every one."""
    choose = random.Random(2)
    stuck: Counter[bool] = Counter()
    for seed in range(2000):
        programs_ = at_random(choose)
        kinds = {fault.kind for fault in check(programs_)}
        if "unmatched" not in kinds:
            assert kinds <= {"deadlock"}
            stuck[bool(kinds)] += 1
            assert Executor(programs_, seed).run() == (not kinds)
    assert min(stuck.values()) > 200


def test_a_thousand_mutations_are_all_told() -> None:
    choose = random.Random(7)
    working = [of(name, 4, 6, size=8) for name in NAMES if name != "list"]
    tried = 0
    while tried < 1000:
        found = [list(program) for program in choose.choice(working)]
        mutation = choose.choice(MUTATIONS)
        if mutation(choose.choice(found), choose):
            broken = [tuple(program) for program in found]
            if check(broken):
                tried += 1
            else:
                # two messages of different pairs in the other order may do no harm
                assert mutation is swap
                assert Executor(broken, tried).run()


def test_what_passes_never_hangs() -> None:
    choose = random.Random(3)
    names = [name for name in NAMES if name != "list"]
    for seed in range(300):
        found = of(choose.choice(names), choose.choice((2, 4)), choose.choice((1, 2, 5)))
        assert check(found) == []
        assert Executor(found, seed, choose.choice((0, 0, 1)), choose.random() < 0.7, choose.random() < 0.7).run()
