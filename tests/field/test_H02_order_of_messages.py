"""H02: neighbours of a pipeline that both send, or whose messages of two directions wait for one another.

Reported: both sides block in a send; messages of virtual stages wait on each other, so that to swap the order on odd
ranks is not enough; communicators of two ranks are made in another order on each, which hangs now and then.
https://github.com/pytorch/pytorch/issues/172668
https://github.com/pytorch/pytorch/issues/109401
https://github.com/NVIDIA/nccl/issues/479
https://github.com/NVIDIA/Megatron-LM/pull/5240
https://github.com/meta-pytorch/torchrec/pull/4472

The check takes no message as done before both sides are there, one after the other on each rank. Real processes run in
tests/parallel/test_pipeline_ranks.py.
"""

from __future__ import annotations

from collections import Counter

import pytest

from meshwright.compiler.schedules import catalogue
from meshwright.compiler.schedules.deadlock import check
from meshwright.compiler.schedules.instructions import Compute, Exchange, Instruction, Program, Transfer, Wait
from meshwright.compiler.schedules.lower import neighbours, programs
from meshwright.compiler.schedules.request import Costs
from tests.field.against_one_device import cluster_of, eager, train
from tests.field.stacks import case


def alone(sends: bool, peer: int, value: str) -> Exchange:
    return Exchange((Transfer(sends, peer, value),))


def both(sends_first: bool) -> list[Program]:
    """Two ranks that make a value each and want the other's, message by message."""
    made = []
    for rank, (own, other) in enumerate((("a", "b"), ("b", "a"))):
        peer = 1 - rank
        messages: list[Instruction] = [alone(True, peer, own), Wait(own), alone(False, peer, other), Wait(other)]
        if not sends_first and rank:
            messages = messages[2:] + messages[:2]
        made.append((Compute(f"make {own}", (), (own,)), *messages, Compute("use", (other,))))
    return made


def test_two_that_both_send_first_are_told() -> None:
    (fault,) = check(both(sends_first=True))
    assert fault.kind == "deadlock" and "rank 0" in fault.message and "rank 1" in fault.message
    assert not check(both(sends_first=False))


def ring(turned: int) -> list[Program]:
    """Four ranks, each of which has a value for the next one and sends it first, but for the last ``turned``, which
    receive first."""
    made = []
    for rank in range(4):
        after, before = (rank + 1) % 4, (rank - 1) % 4
        out, back = f"v{rank}", f"v{before}"
        messages: list[Instruction] = [alone(True, after, out), Wait(out), alone(False, before, back), Wait(back)]
        if rank >= 4 - turned:
            messages = messages[2:] + messages[:2]
        made.append((Compute(f"make {out}", (), (out,)), *messages, Compute("use", (back,))))
    return made


def test_a_ring_comes_to_an_end_if_one_of_it_receives_first() -> None:
    (fault,) = check(ring(0))
    assert all(f"rank {rank}" in fault.message for rank in range(4))
    assert not check(ring(1))


def test_the_first_use_of_a_pair_waits_for_both() -> None:
    """Where communicators are made when they are first needed, the order of first uses must be one on all ranks, even
    if nothing is waited for."""
    order = {0: (1, 2), 1: (2, 0), 2: (0, 1)}
    made: list[Program] = []
    for rank, peers in order.items():
        begun = [alone(rank < peer, peer, f"{min(rank, peer)}{max(rank, peer)}") for peer in peers]
        values = [exchange.transfers[0].value for exchange in begun]
        mine = tuple(v for v, e in zip(values, begun, strict=True) if e.transfers[0].sends)
        made.append((Compute("make", (), mine), *begun, *map(Wait, values)))
    (fault,) = check(made)
    assert "first use" in fault.message


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", catalogue.modules())
def test_every_schedule_comes_to_an_end(name: str, ranks: int) -> None:
    """Whatever the costs: passes in which messages take no time, and such in which they take more than all else."""
    stages = ranks * catalogue.virtual(name)
    for send in (0.0, 1.0, 7.0):
        costs = Costs(1.0, 1.0, 1.0, send)
        schedule = catalogue.make(name, catalogue.request_for(name, stages, 3 * ranks, None, costs))
        made = programs(schedule, costs)
        assert not check(made)
        for rank, program in enumerate(made):
            begun = Counter(t.value for i in program if isinstance(i, Exchange) for t in i.transfers)
            waited = [i.value for i in program if isinstance(i, Wait)]
            assert set(waited) == set(begun), f"rank {rank} begins what it does not wait for"


def test_four_stages_on_two_ranks_that_all_send_both_ways() -> None:
    """The reproduction: interleaved, so that each rank sends to the other forward and backward at once."""
    made = case()
    assert train(cluster_of(made, "pp=2,schedule=interleaved", 2, 8), made).far_from(eager(made)) < 1e-11


def test_a_value_for_two_ranks_is_waited_for_once() -> None:
    """The second of four stages has made what the third and the fourth one read, as an encoder for its decoder."""
    links = {**neighbours(4), (3, "F"): ((1, "F"), (2, "F")), (1, "I"): ((2, "I"), (3, "I"))}
    for name in ("gpipe", "1f1b", "zb-h1"):
        made = programs(catalogue.make(name, catalogue.request_for(name, 4, 6, None, Costs())), links=links)
        assert not check(made)
        sent = Counter(t.value for i in made[1] if isinstance(i, Exchange) for t in i.transfers if t.sends)
        assert {value: count for value, count in sent.items() if "F" in value} == {f"1F{m}": 2 for m in range(6)}
