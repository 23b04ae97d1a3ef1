"""What can be seen of programs of ranks without running them: messages that do not match, values that are not there."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from meshwright.compiler.schedules.instructions import (
    Collective,
    Compute,
    Exchange,
    Instruction,
    Program,
    Wait,
    renumbered,
)


@dataclass(frozen=True)
class Fault:
    """One finding: ``kind`` is ``unmatched``, ``unready``, ``unwaited`` or ``deadlock``."""

    kind: str
    message: str
    rank: int = -1
    position: int = -1
    """Of the instruction, within its rank's program."""


def values(rank: int, program: Program, ranks: Sequence[int]) -> Iterator[Fault]:
    """What is read before it is there, and what is never waited for. Faults name ``ranks[i]`` for the program ``i``."""
    there: set[str] = set()
    coming: set[str] = set()
    leaving: set[str] = set()

    def fault(instruction: Instruction, message: str) -> Fault:
        said = f"rank {ranks[rank]}, instruction {position}: {renumbered(instruction, ranks)}{message}"
        return Fault("unready", said, ranks[rank], position)

    position = -1
    for position, instruction in enumerate(program):  # noqa: B007 (faults read it)
        kind = type(instruction)
        if kind is Compute:
            assert isinstance(instruction, Compute)
            for value in instruction.needs:
                if value not in there:
                    why = "has been asked for but not waited for" if value in coming else "is not there"
                    yield fault(instruction, f" reads {value}, which {why}")
            for value in instruction.gives:
                if value in there:
                    yield fault(instruction, f" makes {value} a second time")
                there.add(value)
        elif kind is Wait:
            assert isinstance(instruction, Wait)
            value = instruction.value
            if value in coming:
                coming.discard(value)
                there.add(value)
            elif value not in leaving:
                yield fault(instruction, ": no message with it is under way")
            leaving.discard(value)
        elif kind is Collective:
            assert isinstance(instruction, Collective)
            value = instruction.value
            if value not in there:
                yield fault(instruction, f": {value} is not there")
            there.discard(value)
            coming.add(value)
        else:
            assert isinstance(instruction, Exchange)
            for transfer in instruction.transfers:
                if not transfer.sends:
                    if transfer.value in coming or transfer.value in there:
                        yield fault(instruction, f": {transfer.value} comes a second time")
                    coming.add(transfer.value)
                elif transfer.value in there:
                    leaving.add(transfer.value)
                else:
                    yield fault(instruction, f": {transfer.value} is not there")
    for value in (*sorted(coming), *sorted(leaving)):
        message = f"rank {ranks[rank]} never waits for the message with {value}"
        yield Fault("unwaited", message, ranks[rank], len(program))


Pair = tuple[int, int]
"""Whose messages go to whom."""
Group = tuple[tuple[int, ...], tuple[str, ...]]
"""The members of a communicator, and the axes of the mesh over which it goes."""
_Call = tuple[str, str, int]


def unmatched(programs: Sequence[Program], ranks: Sequence[int]) -> Iterator[Fault]:
    """The n-th message from a rank to another, and the n-th collective of a group, must be the same on all sides.
    Faults name ``ranks[i]`` for the program ``i``."""
    sent: defaultdict[Pair, list[tuple[str, int, int]]] = defaultdict(list)
    received: defaultdict[Pair, list[tuple[str, int, int]]] = defaultdict(list)
    groups: defaultdict[Group, dict[int, list[_Call]]] = defaultdict(dict)
    for rank, program in enumerate(programs):
        calls: dict[Group, list[_Call]] = {}
        for position, instruction in enumerate(program):
            kind = type(instruction)
            if kind is Exchange:
                assert isinstance(instruction, Exchange)
                for t in instruction.transfers:
                    if t.sends:
                        sent[rank, t.peer].append((t.value, t.size, position))
                    else:
                        received[t.peer, rank].append((t.value, t.size, position))
            elif kind is Collective:
                assert isinstance(instruction, Collective)
                group = (instruction.group, instruction.axes)
                if group not in calls:
                    calls[group] = groups[group].setdefault(rank, [])
                calls[group].append((instruction.signature, instruction.value, position))
    for pair in sorted({*sent, *received}):
        yield from _pairwise(pair, sent[pair], received[pair], ranks)
    for group, members in sorted(groups.items()):
        if group[0] != (next(iter(members)),):  # alone in it, one agrees with everyone
            yield from _groupwise(group, members, ranks)


def _pairwise(
    pair: Pair, sent: list[tuple[str, int, int]], received: list[tuple[str, int, int]], ranks: Sequence[int]
) -> Iterator[Fault]:
    inside = [0 <= side < len(ranks) for side in pair]
    if not all(inside) or pair[0] == pair[1]:
        source, target = (ranks[side] if known else side for side, known in zip(pair, inside, strict=True))
        message = f"a message from rank {source} to rank {target}: there is no such pair"
        yield Fault("unmatched", message, source if inside[0] else target, -1)
        return
    source, target = (ranks[side] for side in pair)
    for number, (one, other) in enumerate(zip(sent, received, strict=False)):
        if one[:2] != other[:2]:
            message = (
                f"message {number} from rank {source} to rank {target}: {_said(*one[:2])} is sent, "
                f"{_said(*other[:2])} is expected"
            )
            yield Fault("unmatched", message, source, one[2])
            return
    if len(sent) != len(received):
        more, rank, other_rank = (sent, source, target) if len(sent) > len(received) else (received, target, source)
        value, _, position = more[min(len(sent), len(received))]
        does, way = ("sends", "to") if more is sent else ("expects", "from")
        message = f"rank {rank} {does} {value} {way} rank {other_rank}, which does not"
        yield Fault("unmatched", message, rank, position)


def _said(value: str, size: int) -> str:
    return f"{value} ({size} bytes)" if size else value


def _groupwise(group: Group, members: dict[int, list[_Call]], ranks: Sequence[int]) -> Iterator[Fault]:
    inside, axes = group
    name = f"the group over ({', '.join(axes)})" if axes else f"the group {','.join(str(ranks[r]) for r in inside)}"
    for rank in members:
        if rank not in inside:
            message = f"rank {ranks[rank]} calls a collective of {name}, to which it does not belong"
            yield Fault("unmatched", message, ranks[rank], -1)
    calls = [members.get(rank, []) for rank in inside]
    for number in range(max(map(len, calls))):
        said = [c[number][:2] if number < len(c) else ("nothing", "") for c in calls]
        if len(set(said)) > 1:
            usual = Counter(said).most_common(1)[0][0]
            odd = next(i for i, s in enumerate(said) if s != usual)
            position = calls[odd][number][2] if number < len(calls[odd]) else -1
            calls_odd, calls_usual = (" of ".join(filter(None, s)) for s in (said[odd], usual))
            message = (
                f"collective {number} of {name}: rank {ranks[inside[odd]]} calls {calls_odd}, others {calls_usual}"
            )
            yield Fault("unmatched", message, ranks[inside[odd]], position)
            return
