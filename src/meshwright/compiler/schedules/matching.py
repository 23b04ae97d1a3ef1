"""What can be seen of programs of ranks without running them: messages that do not match, values that are not there."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from meshwright.compiler.schedules.instructions import Collective, Compute, Exchange, Program, Wait


@dataclass(frozen=True)
class Fault:
    """One finding: ``kind`` is ``unmatched``, ``unready``, ``unwaited`` or ``deadlock``."""

    kind: str
    message: str
    rank: int = -1
    position: int = -1
    """Of the instruction, within its rank's program."""


def values(rank: int, program: Program) -> Iterator[Fault]:
    """What is read before it is there, and what is never waited for."""
    there: set[str] = set()
    coming: Counter[str] = Counter()
    leaving: Counter[str] = Counter()
    for position, instruction in enumerate(program):
        if isinstance(instruction, Compute):
            for value in instruction.needs:
                if value not in there:
                    why = "has been asked for but not waited for" if coming[value] else "is not there"
                    yield Fault("unready", f"rank {rank}: {instruction} reads {value}, which {why}", rank, position)
            for value in instruction.gives:
                if value in there:
                    yield Fault("unready", f"rank {rank}: {instruction} makes {value} a second time", rank, position)
                there.add(value)
        elif isinstance(instruction, Wait):
            if not coming[instruction.value] and not leaving[instruction.value]:
                message = f"rank {rank}: {instruction}: no message with it is under way"
                yield Fault("unready", message, rank, position)
            if coming.pop(instruction.value, 0):
                there.add(instruction.value)
            leaving.pop(instruction.value, 0)
        elif isinstance(instruction, Collective):
            if instruction.value not in there:
                message = f"rank {rank}: {instruction}: {instruction.value} is not there"
                yield Fault("unready", message, rank, position)
            there.discard(instruction.value)
            coming[instruction.value] += 1
        else:
            for transfer in instruction.transfers:
                if not transfer.sends:
                    coming[transfer.value] += 1
                elif transfer.value in there:
                    leaving[transfer.value] += 1
                else:
                    message = f"rank {rank}: {transfer}: {transfer.value} is not there"
                    yield Fault("unready", message, rank, position)
    for value in (*coming, *leaving):
        yield Fault("unwaited", f"rank {rank} never waits for the message with {value}", rank, len(program))


def unmatched(programs: Sequence[Program]) -> Iterator[Fault]:
    """The n-th message from a rank to another, and the n-th collective of a group, must be the same on all sides."""
    sides: tuple[defaultdict[tuple[int, int], list[tuple[str, int, int]]], ...] = (defaultdict(list), defaultdict(list))
    groups: defaultdict[tuple[int, ...], dict[int, list[tuple[str, str, int]]]] = defaultdict(dict)
    for rank, program in enumerate(programs):
        for position, instruction in enumerate(program):
            if isinstance(instruction, Exchange):
                for t in instruction.transfers:
                    pair = (rank, t.peer) if t.sends else (t.peer, rank)
                    sides[not t.sends][pair].append((t.value, t.size, position))
            elif isinstance(instruction, Collective):
                calls = groups[instruction.group].setdefault(rank, [])
                calls.append((instruction.signature, instruction.value, position))
    for pair in sorted({*sides[0], *sides[1]}):
        yield from _pairwise(pair, sides[0][pair], sides[1][pair], len(programs))
    for group, members in sorted(groups.items()):
        yield from _groupwise(group, members)


def _pairwise(
    pair: tuple[int, int], sent: list[tuple[str, int, int]], received: list[tuple[str, int, int]], ranks: int
) -> Iterator[Fault]:
    source, target = pair
    if not (0 <= source < ranks and 0 <= target < ranks) or source == target:
        where = source if 0 <= source < ranks else target
        yield Fault("unmatched", f"a message from rank {source} to rank {target}: there is no such pair", where, -1)
        return
    for number, (one, other) in enumerate(zip(sent, received, strict=False)):
        if one[:2] != other[:2]:
            message = (
                f"message {number} from rank {source} to rank {target}: {_said(*one[:2])} is sent, "
                f"{_said(*other[:2])} is expected"
            )
            yield Fault("unmatched", message, source, one[2])
            return
    if len(sent) != len(received):
        more, rank = (sent, source) if len(sent) > len(received) else (received, target)
        value, _, position = more[min(len(sent), len(received))]
        word = "sends" if more is sent else "expects"
        message = (
            f"rank {rank} {word} {value} {'to' if more is sent else 'from'} rank {sum(pair) - rank}, which does not"
        )
        yield Fault("unmatched", message, rank, position)


def _said(value: str, size: int) -> str:
    return f"{value} ({size} bytes)" if size else value


def _groupwise(group: tuple[int, ...], members: dict[int, list[tuple[str, str, int]]]) -> Iterator[Fault]:
    name = f"the group {','.join(map(str, group))}"
    for rank in members:
        if rank not in group:
            yield Fault("unmatched", f"rank {rank} calls a collective of {name}, to which it does not belong", rank, -1)
    calls = [members.get(rank, []) for rank in group]
    for number in range(max(map(len, calls))):
        said = [c[number][:2] if number < len(c) else ("nothing", "") for c in calls]
        if len(set(said)) > 1:
            usual = Counter(said).most_common(1)[0][0]
            odd = next(i for i, s in enumerate(said) if s != usual)
            position = calls[odd][number][2] if number < len(calls[odd]) else -1
            message = (
                f"collective {number} of {name}: rank {group[odd]} calls {' of '.join(filter(None, said[odd]))}, "
                f"others {' of '.join(filter(None, usual))}"
            )
            yield Fault("unmatched", message, group[odd], position)
            return
