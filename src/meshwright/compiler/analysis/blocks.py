"""Fold a step: of every kind of repeated block the first two copies stay, the others are taken out.

A model of 126 equal layers is planned and priced by a program of two. The folded program is the one that capturing the
shallow model would give: the stream of activations goes from the second layer to what follows the last one, and its
gradient the other way; sums over layers, such as the gradient norm, have fewer terms. What cannot be folded safely
stays as it is, and is told.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from meshwright.compiler.analysis.level import KEPT, Drawn, Group, Level, Unknown, region_of
from meshwright.compiler.graph.program import Parameter, StepProgram, TensorSpec, annotation

__all__ = ["Folded", "Group", "Unknown", "fold", "region_of", "unfolded"]

LEVELS = 3
"""How deep blocks within blocks are looked at."""


@dataclass(frozen=True)
class Folded:
    """A folded step, and what it stands for."""

    program: StepProgram
    repeats: Mapping[str, int]
    """Of blocks of ``program``, regions within blocks included: how many equal ones they stand for."""
    groups: tuple[Group, ...]
    unfolded: tuple[str, ...] = ()
    """Why blocks that come again and again were kept."""
    source: StepProgram | None = field(default=None, repr=False)
    """The step that was folded."""
    absent: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Blocks that ``source`` does not have itself; see :func:`fold`."""
    drawn: Drawn | None = field(default=None, repr=False, compare=False)
    """What is known of the source's outermost blocks."""

    def refold(self, treatments: Mapping[str, Hashable]) -> Folded:
        """The same step, folded for a plan that treats blocks so; see :func:`fold`."""
        return fold(self.source or self.program, treatments, self.absent, self.drawn)

    def blocks(self) -> tuple[str, ...]:
        """The names of all blocks of the whole step that are labels of its nodes, those that were taken out too."""
        labels = dict.fromkeys(annotation(n).block for n in (self.source or self.program).micro.module.graph.nodes)
        return tuple(name for label in labels if label for name in self._names(label))

    def parameters(self) -> tuple[Parameter, ...]:
        """All parameters of the whole step."""
        return tuple(
            replace(p, name=name, aliases=tuple(aliases))
            for p in (self.source or self.program).parameters
            for name, *aliases in zip(self._names(p.name), *map(self._names, p.aliases), strict=True)
        )

    def names(self) -> dict[str, str]:
        """The names of all parameters of the whole step, and by each the equal one that ``source`` has."""
        return {name: p.name for p in (self.source or self.program).parameters for name in self._names(p.name)}

    def state(self) -> dict[str, TensorSpec]:
        """All optimizer state of the whole step."""
        specs = (self.source or self.program).state
        return {name: spec for known, spec in specs.items() for name in self._names(known)}

    def _names(self, name: str) -> Iterator[str]:
        """The name, and those in absent blocks that are equal but for the block's name."""
        yield name
        for block, others in self.absent.items():
            if name == block or name.startswith(block + "."):
                yield from (other + name[len(block) :] for other in others)


def fold(
    program: StepProgram,
    treatments: Mapping[str, Hashable] | None = None,
    absent: Mapping[str, tuple[str, ...]] | None = None,
    drawn: Drawn | None = None,
    kept: int = KEPT,
) -> Folded:
    """Fold the repeated blocks of a step; the given program is left as it is.

    ``treatments``: by block, how a plan treats it; blocks that are treated differently are of different kinds.
    ``absent``: by block, the names of further equal ones that the model has, but the program does not. Raises Unknown
    if one of those is treated as no block of the program is. ``drawn`` is what an earlier fold of the program found.
    ``kept``: how many copies of each kind stay.
    The result keeps the fingerprint of the program that is folded.
    """
    source, absent = program, absent or {}
    groups: list[Group] = []
    reasons: list[str] = []
    for depth in range(1, LEVELS + 1):
        if depth > 1 and not _nested(program, depth, groups):
            break
        level = Level(program, depth, groups, treatments or {}, absent, drawn if depth == 1 else None, kept)
        drawn = level.drawn if depth == 1 else drawn
        program = level.fold(reasons)
        groups += level.groups
    known = {name for g in groups for name in g.blocks}
    lost = sorted(block for block, others in absent.items() if not known.issuperset(others))
    if lost:
        raise Unknown(f"what {', '.join(lost)} stands for could not be folded")
    return Folded(
        program, _repeats(program, groups), tuple(groups), tuple(dict.fromkeys(reasons)), source, dict(absent), drawn
    )


def unfolded(program: StepProgram) -> Folded:
    """A step all of whose blocks stay."""
    return Folded(program, {}, ())


def _nested(program: StepProgram, depth: int, groups: list[Group]) -> bool:
    """Whether there are blocks so deep within others that were not folded."""
    kept = tuple(f"{name}." for g in groups for name in g.kept)
    labels = {annotation(n).block for n in program.micro.module.graph.nodes}
    return any(region_of(label, depth) != region_of(label, depth - 1) for label in labels if not label.startswith(kept))


def _repeats(program: StepProgram, groups: list[Group]) -> dict[str, int]:
    """For the last kept copy of each kind, and the blocks within it: how many copies it stands for."""
    found = {g.kept[-1]: g.copies for g in groups}
    labels = {annotation(n).block for g in (program.micro, program.update) for n in g.module.graph.nodes}
    for label in sorted(labels):
        around = next((kept for kept in found if label.startswith(kept + ".")), None)
        if around is not None:
            found[label] = found[around]
    return found
