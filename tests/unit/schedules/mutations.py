"""Ways to break the program of a rank. Each changes it in place and says whether there was something to change."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

from meshwright.compiler.schedules.instructions import Collective, Compute, Exchange, Instruction, Transfer, Wait

Mutation = Callable[[list[Instruction], random.Random], bool]
COMMUNICATIONS = (Exchange, Collective)


def _one(program: list[Instruction], choose: random.Random, *kinds: type) -> int | None:
    places = [i for i, one in enumerate(program) if isinstance(one, kinds)]
    return choose.choice(places) if places else None


def swap(program: list[Instruction], choose: random.Random) -> bool:
    """Two communications in the other order: far from each other, or neighbours."""
    places = [i for i, one in enumerate(program) if isinstance(one, COMMUNICATIONS)]
    if len(places) < 2:
        return False
    first = choose.randrange(len(places) - 1)
    second = choose.choice((first + 1, choose.randrange(first + 1, len(places))))
    one, other = places[first], places[second]
    program[one], program[other] = program[other], program[one]
    return True


def drop(program: list[Instruction], choose: random.Random) -> bool:
    at = _one(program, choose, *COMMUNICATIONS)
    if at is None:
        return False
    del program[at]
    return True


def duplicate(program: list[Instruction], choose: random.Random) -> bool:
    at = _one(program, choose, *COMMUNICATIONS)
    if at is None:
        return False
    program.insert(choose.randrange(at, len(program)), program[at])
    return True


def missing_wait(program: list[Instruction], choose: random.Random) -> bool:
    at = _one(program, choose, Wait)
    if at is None:
        return False
    del program[at]
    return True


def late_wait(program: list[Instruction], choose: random.Random) -> bool:
    """What comes is waited for behind what reads it."""
    coming = {one.value for one in program if isinstance(one, Collective)}
    coming |= {t.value for one in program if isinstance(one, Exchange) for t in one.transfers if not t.sends}
    readers = {value: i for i, one in enumerate(program) if isinstance(one, Compute) for value in one.needs}
    waits = [(i, one.value) for i, one in enumerate(program) if isinstance(one, Wait) and one.value in coming]
    places = [(i, readers[value]) for i, value in waits if readers.get(value, -1) > i]
    if not places:
        return False
    at, reader = choose.choice(places)
    program.insert(reader, program.pop(at))
    return True


def _transfer(program: list[Instruction], choose: random.Random, change: Callable[[Transfer], Transfer]) -> bool:
    at = _one(program, choose, Exchange)
    if at is None:
        return False
    exchange = program[at]
    assert isinstance(exchange, Exchange)
    transfers = list(exchange.transfers)
    number = choose.randrange(len(transfers))
    transfers[number] = change(transfers[number])
    program[at] = Exchange(tuple(transfers))
    return True


def wrong_peer(program: list[Instruction], choose: random.Random) -> bool:
    return _transfer(program, choose, lambda t: replace(t, peer=t.peer + choose.choice((-1, 1))))


def wrong_size(program: list[Instruction], choose: random.Random) -> bool:
    return _transfer(program, choose, lambda t: replace(t, size=t.size * 2 + 4))


def wrong_value(program: list[Instruction], choose: random.Random) -> bool:
    return _transfer(program, choose, lambda t: replace(t, value="0F99"))


def _collective(program: list[Instruction], choose: random.Random, change: Callable[[Collective], Collective]) -> bool:
    at = _one(program, choose, Collective)
    if at is None:
        return False
    collective = program[at]
    assert isinstance(collective, Collective)
    changed = change(collective)
    program[at] = changed
    return changed != collective


def wrong_dtype(program: list[Instruction], choose: random.Random) -> bool:
    return _collective(program, choose, lambda c: replace(c, signature=_word(c.signature, 1, "bf16")))


def wrong_count(program: list[Instruction], choose: random.Random) -> bool:
    return _collective(program, choose, lambda c: replace(c, signature=_word(c.signature, 2, "12345")))


def wrong_kind(program: list[Instruction], choose: random.Random) -> bool:
    return _collective(program, choose, lambda c: replace(c, signature=_word(c.signature, 0, "all_reduce(max)")))


def wrong_group(program: list[Instruction], choose: random.Random) -> bool:
    """The group of another of the rank's collectives."""
    groups = {(one.group, one.axes) for one in program if isinstance(one, Collective)}
    group, axes = choose.choice(sorted(groups)) if groups else ((), ())
    return _collective(program, choose, lambda c: replace(c, group=group, axes=axes))


def _word(signature: str, at: int, word: str) -> str:
    words = signature.split()
    return " ".join([*words[:at], word, *words[at + 1 :]])


MUTATIONS: tuple[Mutation, ...] = (
    swap, drop, duplicate, missing_wait, late_wait, wrong_peer, wrong_size, wrong_value, wrong_dtype, wrong_count,
    wrong_kind, wrong_group,
)  # fmt: skip
