"""Who wants an op cut where: operands propose the cuts that they have, and the stronger proposal wins.

- ``HARD``     the batch, tensor-parallel weights and what follows from them;
- ``SOFT``     sequence sharding: activations between tensor-parallel regions;
- ``STORAGE``  weights stored in shards: gathered before use, kept only by casts and views of weights.

Among equals the proposal that moves fewer bytes wins.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum

from meshwright.compiler.mesh import Dim, Mesh, Segment, Sharding, split
from meshwright.compiler.rules.rule import Dims, Rule


class Priority(IntEnum):
    STORAGE = 1
    SOFT = 2
    HARD = 3


@dataclass(frozen=True)
class Held:
    """A value as it lies now: its sharding, how strongly each axis is meant, and its size in bytes."""

    sharding: Sharding
    priority: Mapping[str, Priority] = field(default_factory=dict)
    bytes: float = 0.0


@dataclass(frozen=True)
class Proposal:
    factor: str
    priority: Priority
    dim: Dim
    """The segments of the factor as the proposer has them."""
    operand: int
    """Which operand proposes; -1 for a wanted result."""


def propose(
    rule: Rule, operands: tuple[Held, ...], wanted: tuple[Sharding | None, ...], mesh: Mesh
) -> dict[str, list[Proposal]]:
    """By axis, the cuts that operands have and that results will need."""
    proposals: dict[str, list[Proposal]] = {axis: [] for axis in mesh.names}
    for number, (dims, held) in enumerate(zip(rule.operands, operands, strict=True)):
        for factor, dim in factor_parts(rule, dims, held.sharding, mesh).items():
            for axis in (a for s in dim for a in s.axes):
                strength = held.priority.get(axis, Priority.HARD)
                proposals[axis].append(Proposal(factor, strength, dim, number))
    for result, want in zip(rule.results, wanted, strict=False):
        if result is None or want is None:
            continue
        for factor, dim in factor_parts(rule, result, want, mesh).items():
            for axis in (a for s in dim for a in s.axes):
                proposals[axis].append(Proposal(factor, Priority.HARD, dim, -1))
    return proposals


def factor_parts(rule: Rule, dims: Dims, sharding: Sharding, mesh: Mesh) -> dict[str, Dim]:
    """The segments of each factor of a tensor; a dim whose cut straddles factors counts as uncut."""
    found: dict[str, Dim] = {}
    for factors, dim in zip(dims, sharding.dims, strict=True):
        parts = split(dim, tuple(rule.sizes[f] for f in factors), mesh)
        for i, factor in enumerate(factors):
            found[factor] = parts[i] if parts is not None else (Segment(rule.sizes[factor]),)
    return found


def time_factor(rule: Rule, number: int, sharding: Sharding, mesh: Mesh, axis: str) -> tuple[str, Dim] | None:
    """The factor onto which an owed sum is scattered under sequence sharding: the first dim after the
    batch that divides, never the last one (which carries the features)."""
    count = mesh.size(axis)
    for d, dim in enumerate(sharding.dims[:-1]):
        factors = rule.operands[number][d]
        parts = split(dim, tuple(rule.sizes[f] for f in factors), mesh)
        if parts is None:
            continue
        for i, factor in enumerate(factors):
            for j, segment in enumerate(parts[i]):
                if d == i == j == 0 or segment.axes or segment.size % count or factor in rule.whole:
                    continue
                cut = tuple(Segment(s.size, (axis,)) if k == j else s for k, s in enumerate(parts[i]))
                return factor, cut
    return None


def choose(
    rule: Rule,
    operands: tuple[Held, ...],
    parts: list[dict[str, Dim]],
    proposals: list[Proposal],
    axis: str,
    mesh: Mesh,
    keep_storage: bool,
    whole: bool,
) -> Proposal | None:
    legal = [p for p in proposals if p.factor not in rule.whole]
    if whole:
        legal = [p for p in legal if all(r is None or any(p.factor in fs for fs in r) for r in rule.results)]
        if any(p.factor in rule.reduce for p in proposals) or rule.reduce:
            legal = []
    if not keep_storage:
        legal = [p for p in legal if p.priority > Priority.STORAGE]
    if not legal:
        return None
    strongest = max(p.priority for p in legal)
    candidates = {p.factor: p for p in reversed(legal) if p.priority == strongest}
    if len(candidates) == 1:
        return next(iter(candidates.values()))

    def moved(factor: str) -> float:
        total = 0.0
        for held, factors in zip(operands, parts, strict=True):
            elsewhere = any(axis in s.axes for f, dim in factors.items() if f != factor for s in dim)
            if elsewhere:
                total += held.bytes / max(1, mesh.size(*(held.sharding.axes - {axis})))
        for dims in rule.results:
            if dims is not None and not any(factor in fs for fs in dims):
                total += 8.0 * math.prod(rule.sizes[f] for fs in dims for f in fs)
        return total

    return min(candidates.values(), key=lambda p: moved(p.factor))
