"""Ranks that do the same are represented once: the programs of all ranks of a mesh, however many there are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from meshwright.compiler.mesh import Mesh
from meshwright.compiler.schedules.instructions import Collective, Exchange, Instruction, Program, renumbered


@dataclass(frozen=True)
class RankPrograms:
    """The programs of all ranks of a mesh, which differ along the axes ``apart`` alone.

    There is one program for each combination of coordinates on those axes, the last axis fastest, and it stands for all
    ranks that have them. In it, peers are numbers of such programs: the rank meant is the one whose coordinates
    on all other axes are one's own. A collective's ``axes`` say over which ranks it goes, its ``group`` which programs
    these have.

    To check these programs is to check those of all ranks. Call *copy* the ranks that have the same coordinates on all
    other axes. Messages stay within a copy; a collective joins ranks of several copies, but all of them do with it what
    their programs say. Take any execution of the programs, and let every copy do each of its steps: if all programs of
    a group have reached its n-th collective, then in every copy all ranks with these programs have, and so have all
    its members; the same holds for messages. So what one execution does, all copies can do in step, and if the programs
    come to an end, the ranks do. If the programs are stuck, then so is every rank after the same steps: a meeting that
    lacks a program lacks the ranks that have it. What can happen does not depend on the order in which it does, so that
    no other order helps. What is seen without an execution is equal too: values are of one rank, messages of one copy,
    and members of a group that have one program agree with each other.
    """

    mesh: Mesh
    apart: tuple[str, ...]
    programs: tuple[Program, ...]

    @cached_property
    def _kinds(self) -> Mesh:
        return Mesh(tuple(axis for axis in self.mesh.axes if axis[0] in self.apart))

    @cached_property
    def first(self) -> tuple[int, ...]:
        """By program, the first rank that it stands for."""
        zero = dict.fromkeys(self.mesh.names, 0)
        return tuple(
            self.mesh.rank({**zero, **self._kinds.coordinates(number)}) for number in range(len(self.programs))
        )

    def everyone(self) -> tuple[Program, ...]:
        """By rank: its program, in which peers and groups are ranks."""
        cosets: dict[int, tuple[int, ...]] = {}
        found = []
        for rank in range(self.mesh.ranks):
            own = self.mesh.coordinates(rank)
            first = self.mesh.rank({**own, **dict.fromkeys(self.apart, 0)})
            if first not in cosets:
                kinds = (self._kinds.coordinates(number) for number in range(len(self.programs)))
                cosets[first] = tuple(self.mesh.rank({**own, **kind}) for kind in kinds)
            groups: dict[tuple[str, ...], tuple[int, ...]] = {}
            number = self._kinds.rank(own)
            found.append(tuple(self._of_rank(i, rank, cosets[first], groups) for i in self.programs[number]))
        return tuple(found)

    def _of_rank(
        self,
        instruction: Instruction,
        rank: int,
        copy: Sequence[int],
        groups: dict[tuple[str, ...], tuple[int, ...]],
    ) -> Instruction:
        if not isinstance(instruction, Collective):
            return renumbered(instruction, copy)
        axes = instruction.axes
        if axes not in groups:
            groups[axes] = tuple(sorted(self.mesh.group(rank, axes)))
        return replace(instruction, group=groups[axes])


def group_of(mesh: Mesh, axes: Sequence[str]) -> tuple[str, ...]:
    """The axes over which a collective goes, as all that go over the same ranks name them: in the mesh's order, without
    those of a single rank."""
    return tuple(name for name, size in mesh.axes if name in axes and size > 1)


def represented(mesh: Mesh, programs: Sequence[Program]) -> RankPrograms:
    """The programs of all ranks with those represented once that differ only on axes along which programs are equal."""
    seen = [_Seen(mesh, rank, program) for rank, program in enumerate(programs)]
    apart = tuple(name for name in mesh.names if not _equal_along(mesh, name, seen))
    kinds = Mesh(tuple(axis for axis in mesh.axes if axis[0] in apart))
    zero = dict.fromkeys(mesh.names, 0)
    numbers = [kinds.rank(mesh.coordinates(rank)) for rank in range(mesh.ranks)]
    found = []
    for number in range(kinds.ranks):
        rank = mesh.rank({**zero, **kinds.coordinates(number)})
        found.append(tuple(_of_kind(i, numbers) for i in programs[rank]))
    return RankPrograms(mesh, apart, tuple(found))


def _of_kind(instruction: Instruction, numbers: Sequence[int]) -> Instruction:
    made = renumbered(instruction, numbers)
    return replace(made, group=tuple(sorted(set(made.group)))) if isinstance(made, Collective) else made


class _Seen:
    """What a rank does, seen from it: peers and groups by the axes on which they differ from it."""

    def __init__(self, mesh: Mesh, rank: int, program: Program) -> None:
        own = mesh.coordinates(rank)
        self.crosses: set[str] = set()
        """The axes along which it sends to single ranks."""
        self.regular = True
        """Whether all groups go over axes of the mesh."""
        peers: dict[int, Mapping[str, int]] = {}
        found: list[object] = []
        for instruction in program:
            if isinstance(instruction, Exchange):
                for t in instruction.transfers:
                    if t.peer not in peers:
                        inside = 0 <= t.peer < mesh.ranks
                        there = mesh.coordinates(t.peer) if inside else {}
                        peers[t.peer] = {axis: at for axis, at in there.items() if at != own[axis]}
                        self.crosses.update(peers[t.peer])
                        self.regular &= inside
                    found.append((t.sends, t.value, t.size, tuple(peers[t.peer].items())))
            elif isinstance(instruction, Collective):
                regular = instruction.group == tuple(sorted(mesh.group(rank, instruction.axes)))
                self.regular &= regular
                found.append((instruction.signature, instruction.value, instruction.axes))
            else:
                found.append(instruction)
        self.does = tuple(found)


def _equal_along(mesh: Mesh, axis: str, seen: Sequence[_Seen]) -> bool:
    if not all(one.regular and axis not in one.crosses for one in seen):
        return False
    firsts = (mesh.rank({**mesh.coordinates(rank), axis: 0}) for rank in range(mesh.ranks))
    return all(one.does == seen[first].does for one, first in zip(seen, firsts, strict=True))
