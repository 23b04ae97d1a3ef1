"""Folding of the blocks at one depth of nesting: which are of one kind, the step without those too many."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass

from torch import fx

from meshwright.compiler.analysis.likeness import Portrait, portraits, within
from meshwright.compiler.analysis.rebuild import without_regions
from meshwright.compiler.analysis.regions import Regions, find_regions
from meshwright.compiler.analysis.removal import Unsafe, plan_removal
from meshwright.compiler.graph.program import StepProgram, annotation

KEPT = 2
"""Copies of each kind that stay: the first, and one that stands for all others."""
Kind = tuple[str, int, Hashable]
"""The container of a block, a number for what it computes, and how a plan treats it."""


Drawn = tuple[list[Regions], list[dict[str, Portrait]]]
"""The regions of a step's graphs with their portraits, which do not depend on how a plan treats them."""


@dataclass(frozen=True)
class Group:
    """One kind of block: the names of all copies in order, and of those that stay."""

    blocks: tuple[str, ...]
    kept: tuple[str, ...]

    @property
    def copies(self) -> int:
        """How many equal blocks the last kept one stands for."""
        return len(self.blocks) - len(self.kept) + 1


class Unknown(Exception):
    """What a block that is not in the program is equal to cannot be told."""


def region_of(block: str, depth: int) -> str:
    """The part of a block's path up to its ``depth``-th number: ``layers.3.experts.1`` -> ``layers.3``."""
    parts = block.split(".")
    numbers = [i for i, part in enumerate(parts) if part.isdecimal()]
    return ".".join(parts[: numbers[depth - 1] + 1]) if len(numbers) >= depth else block


class Level:
    """Blocks at one depth of nesting, in all graphs of a step. Within blocks that are folded nothing more is."""

    def __init__(
        self,
        program: StepProgram,
        depth: int,
        done: list[Group],
        treatments: Mapping[str, Hashable],
        absent: Mapping[str, tuple[str, ...]],
        drawn: Drawn | None = None,
        kept: int = KEPT,
    ) -> None:
        self._kept = kept
        self.groups: list[Group] = []
        self._program = program
        self._depth = depth
        self._done = [name for g in done for name in g.kept]
        self._treatments = treatments
        self._absent = {b: names for b, names in absent.items() if b not in self._done}
        self._known: dict[str, str] = {"": ""}
        self.drawn = drawn or self._draw(program)
        self._graphs, self._portraits = self.drawn

    def _draw(self, program: StepProgram) -> Drawn:
        regions = [find_regions(g, self._region) for g in (program.micro, program.update)]
        return regions, [portraits(r) for r in regions]

    def fold(self, reasons: list[str]) -> StepProgram:
        """The folded program. Adds to ``reasons`` why repeated blocks were kept."""
        kinds = self._kinds()
        copies: dict[Kind, list[str]] = {}
        for region, kind in kinds.items():
            copies.setdefault(kind, []).append(region)
        names = self._with_absent(kinds, copies)
        repeated = {k: found for k, found in names.items() if len(found) > min(self._kept, len(copies[k]))}
        program = self._program
        while repeated:
            removed = frozenset(r for k in repeated for r in copies[k][self._kept :])
            try:
                program = self._without(removed, {r: str(k) for r, k in kinds.items()})
            except Unsafe as fault:
                # the kind at fault stays whole, the others are tried again
                guilty = kinds.get(fault.region)
                found = repeated.pop(guilty if guilty is not None and guilty in repeated else next(iter(repeated)))
                reasons.append(f"{found[0]} and {len(found) - 1} like it: {fault}")
                continue
            self.groups = [Group(tuple(found), tuple(copies[k][: self._kept])) for k, found in repeated.items()]
            break
        reasons += _unlike({k: found for k, found in names.items() if found[0] not in self._done})
        return program

    def _without(self, removed: frozenset[str], kinds: Mapping[str, str]) -> StepProgram:
        if not removed:
            return self._program
        pairs = zip(self._graphs, self._portraits, strict=True)
        return without_regions(self._program, *(plan_removal(g, p, kinds, removed) for g, p in pairs))

    def _region(self, node: fx.Node) -> str:
        block = annotation(node).block
        if block not in self._known:
            around = next((d for d in self._done if block == d or block.startswith(d + ".")), None)
            self._known[block] = around or region_of(block, self._depth)
        return self._known[block]

    def _kinds(self) -> dict[str, Kind]:
        """The kind of every region: two regions of one kind are equal but for their names."""
        order = list(dict.fromkeys(region for p in self._portraits for region in p))
        weights: dict[str, list[Hashable]] = {region: [] for region in order}
        for parameter in self._program.parameters:
            parts = parameter.name.split(".")
            for region in (".".join(parts[:i]) for i in range(1, len(parts))):
                if region in weights:
                    aliases = tuple(within(a, region) for a in parameter.aliases)
                    name = within(parameter.name, region)
                    weights[region].append((name, parameter.spec, parameter.trainable, parameter.group, aliases))
        numbers: dict[Hashable, int] = {}
        kinds = {}
        for region in order:
            container = region.rpartition(".")[0]
            lines = tuple(p[region].lines if region in p else () for p in self._portraits)
            number = numbers.setdefault((container, lines, tuple(weights[region])), len(numbers))
            kinds[region] = (container, number, self._treated(region))
        return kinds

    def _treated(self, region: str) -> Hashable:
        inside = ((b, t) for b, t in self._treatments.items() if b == region or b.startswith(region + "."))
        return tuple((b[len(region) :], t) for b, t in inside)

    def _with_absent(self, kinds: Mapping[str, Kind], copies: Mapping[Kind, list[str]]) -> dict[Kind, list[str]]:
        """All names of each kind, those of absent blocks behind those of the program. Raises Unknown."""
        names = {kind: list(found) for kind, found in copies.items()}
        for block, others in self._absent.items():
            if block not in kinds:
                continue
            container, number, _ = kinds[block]
            present = [r for r, k in kinds.items() if k[:2] == (container, number)]
            if len(present) < KEPT:
                # the first or the last block may differ from all others in what they share
                raise Unknown(f"{block} is like no other block of the program, so nobody knows what others are like")
            for other in others:
                kind = (container, number, self._treated(other))
                if kind not in names:
                    raise Unknown(f"{other} is treated as no block of the program is")
                names[kind].append(other)
        return names


def _unlike(names: Mapping[Kind, list[str]]) -> list[str]:
    """Of containers with many blocks, none of which comes more often than is kept: that they are unlike."""
    by_container: dict[str, list[list[str]]] = {}
    for kind, found in names.items():
        by_container.setdefault(kind[0], []).append(found)
    return [
        f"{container}: {sum(map(len, kinds))} blocks of {len(kinds)} kinds, none of which comes more than {KEPT} times"
        for container, kinds in by_container.items()
        if container and sum(map(len, kinds)) > KEPT + 1 and max(map(len, kinds)) <= KEPT
    ]
