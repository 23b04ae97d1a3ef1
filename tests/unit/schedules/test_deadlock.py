"""Programs of ranks: those of schedules come to an end, what is wrong with others is told."""

from __future__ import annotations

import random
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial
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
from meshwright.compiler.schedules.lower import programs
from meshwright.compiler.schedules.request import Costs, Request

NAMES = list(catalogue.modules())


def of(name: str, ranks: int, microbatches: int, costs: Costs | None = None, size: int = 0) -> tuple[Program, ...]:
    request = Request(ranks, microbatches, catalogue.modules()[name].VIRTUAL, costs or Costs())
    return programs(catalogue.make(name, request), costs, size)


@pytest.mark.parametrize("name", NAMES)
def test_programs_of_schedules_come_to_an_end(name: str) -> None:
    counts = (1, 5, 16) if name == "list" else (1, 3, 16, 64)
    for ranks, count in product((2, 3, 4, 8, 16), counts):
        if not catalogue.why_not(name, Request(ranks, count, catalogue.modules()[name].VIRTUAL)):
            for costs in (Costs(), Costs(1.0, 1.3, 0.7, 0.1)):
                assert check(of(name, ranks, count, costs)) == []


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
    assert "rank 0, at instruction 3 (wait a), waits in the message with a for rank 1" in fault.message
    assert "rank 1, at instruction 3 (wait b), waits in the message with b for rank 0" in fault.message
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


Mutation = Callable[[list[Instruction], random.Random], bool]


def drop(program: list[Instruction], choose: random.Random) -> bool:
    del program[choose.randrange(len(program) - 1)]  # that the update is dropped, the next step would tell
    return True


def duplicate(program: list[Instruction], choose: random.Random) -> bool:
    at = choose.randrange(len(program) - 1)
    program.insert(at, program[at])
    return True


def change(program: list[Instruction], choose: random.Random, **fields: object) -> bool:
    exchanges = [i for i, one in enumerate(program) if isinstance(one, Exchange)]
    at = choose.choice(exchanges)
    exchange = program[at]
    assert isinstance(exchange, Exchange)
    transfers = list(exchange.transfers)
    number = choose.randrange(len(transfers))
    old = transfers[number]
    made = {"sends": old.sends, "peer": old.peer, "value": old.value, "size": old.size, **fields}
    transfers[number] = Transfer(**made)  # type: ignore[arg-type]  # its fields
    program[at] = Exchange(tuple(transfers))
    return True


def wrong_peer(program: list[Instruction], choose: random.Random) -> bool:
    return change(program, choose, peer=7)


def wrong_size(program: list[Instruction], choose: random.Random) -> bool:
    return change(program, choose, size=12)


def wrong_value(program: list[Instruction], choose: random.Random) -> bool:
    return change(program, choose, value="0F99")


def missing_wait(program: list[Instruction], choose: random.Random) -> bool:
    waits = [i for i, one in enumerate(program) if isinstance(one, Wait)]
    del program[choose.choice(waits)]
    return True


def swap_messages(program: list[Instruction], choose: random.Random) -> bool:
    """Two messages of one kind with one rank in the other order."""
    found: defaultdict[tuple[bool, int], list[int]] = defaultdict(list)
    for i, one in enumerate(program):
        if isinstance(one, Exchange) and len(one.transfers) == 1:
            found[one.transfers[0].sends, one.transfers[0].peer].append(i)
    pairs = [places for places in found.values() if len(places) > 1]
    if not pairs:
        return False
    one, other = choose.sample(choose.choice(pairs), 2)
    program[one], program[other] = program[other], program[one]
    return True


def late_wait(program: list[Instruction], choose: random.Random) -> bool:
    """What comes is waited for behind the pass that reads it."""
    places = [
        i
        for i, one in enumerate(program[:-1])
        if isinstance(one, Wait) and isinstance(after := program[i + 1], Compute) and one.value in after.needs
    ]
    if not places:
        return False
    at = choose.choice(places)
    program[at], program[at + 1] = program[at + 1], program[at]
    return True


MUTATIONS: list[Mutation] = [
    drop, duplicate, wrong_peer, wrong_size, wrong_value, missing_wait, swap_messages, late_wait,
]  # fmt: skip


def test_a_thousand_mutations_are_all_told() -> None:
    choose = random.Random(7)
    working = [of(name, 4, 6, size=8) for name in NAMES if name != "list"]
    tried = 0
    while tried < 1000:
        found = [list(program) for program in choose.choice(working)]
        mutation = choose.choice(MUTATIONS)
        if mutation(choose.choice(found), choose):
            tried += 1
            assert check([tuple(program) for program in found]), mutation


class Executor:
    """Runs programs in threads, one for each rank, with random delays. A rank waits within a message until the other
    side has come to it too."""

    def __init__(self, found: tuple[Program, ...], seed: int) -> None:
        self.changed = threading.Condition()
        self.begun: dict[tuple[int, int, bool], int] = defaultdict(int)
        self.finished = 0
        self.threads = [
            threading.Thread(target=self.work, args=(rank, program, random.Random(seed * 100 + rank)), daemon=True)
            for rank, program in enumerate(found)
        ]

    def run(self) -> bool:
        for thread in self.threads:
            thread.start()
        for thread in self.threads:
            thread.join(20)
        return self.finished == len(self.threads)

    def come(self, key: tuple[int, int, bool], number: int) -> bool:
        return self.begun[key] >= number

    def work(self, rank: int, program: Program, choose: random.Random) -> None:
        for instruction in program:
            if choose.random() < 0.1:
                time.sleep(choose.random() * 1e-3)
            if isinstance(instruction, Exchange):
                with self.changed:
                    marks = []
                    for t in instruction.transfers:
                        pair = (rank, t.peer) if t.sends else (t.peer, rank)
                        self.begun[(*pair, t.sends)] += 1
                        marks.append(((*pair, not t.sends), self.begun[(*pair, t.sends)]))
                    self.changed.notify_all()
                    for key, number in marks:
                        self.changed.wait_for(partial(self.come, key, number), 20)
        with self.changed:
            self.finished += 1


def test_what_passes_never_hangs() -> None:
    choose = random.Random(3)
    names = [name for name in NAMES if name != "list"]
    for seed in range(300):
        found = of(choose.choice(names), choose.choice((2, 4)), choose.choice((1, 2, 5)))
        assert check(found) == []
        assert Executor(found, seed).run()
