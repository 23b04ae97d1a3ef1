"""How one op is cut: from the shardings of its operands and its rule, the shardings it wants.

For every mesh axis one factor of the op is cut, or none. Operands propose the cuts that they have;
a stronger proposal wins, and among equals the one that moves fewer bytes:

- ``HARD``     the batch, tensor-parallel weights and what follows from them;
- ``SOFT``     sequence sharding: activations between tensor-parallel regions;
- ``STORAGE``  weights stored in shards: gathered before use, kept only by casts and views of weights.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum

from meshwright.compiler.mesh import MICRO, Dim, Mesh, Segment, Sharding, split
from meshwright.compiler.mesh_paths import common_segments
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
class Decision:
    """How an op runs: the segments of every factor, the shardings of its operands and results."""

    segments: Mapping[str, Dim]
    operands: tuple[Sharding, ...]
    results: tuple[Sharding | None, ...]
    priority: Mapping[str, Priority]


@dataclass(frozen=True)
class Proposal:
    factor: str
    priority: Priority
    dim: Dim
    """The segments of the factor as the proposer has them."""
    operand: int
    """Which operand proposes; -1 for a wanted result."""


def decide(
    rule: Rule,
    operands: tuple[Held, ...],
    mesh: Mesh,
    *,
    wanted: tuple[Sharding | None, ...] = (),
    sequence: frozenset[str] = frozenset(),
    regroups: bool = False,
    keep_storage: bool = False,
    whole: bool = False,
) -> Decision:
    """Choose the cut of one op.

    ``wanted`` are shardings that the results will need (their cuts are proposed as HARD);
    ``sequence`` the axes whose owed sums are paid into a cut of the time dim, by the first op that does
    more than regroup elements or add sums (``regroups``), so that no branch pays again; ``keep_storage``
    lets storage cuts stay (the op only reshapes or casts weights); ``whole`` forbids any cut but
    along factors that pass through to every result (whole-matrix optimizer rules).
    """
    parts = [_factor_parts(rule, dims, held.sharding, mesh) for dims, held in zip(rule.operands, operands, strict=True)]
    passing = _passing(rule, operands, mesh)
    proposals: dict[str, list[Proposal]] = {axis: [] for axis in mesh.names}
    for number, (held, factors) in enumerate(zip(operands, parts, strict=True)):
        for factor, dim in factors.items():
            for axis in (a for s in dim for a in s.axes):
                strength = held.priority.get(axis, Priority.HARD)
                proposals[axis].append(Proposal(factor, strength, dim, number))
    for result, want in zip(rule.results, wanted, strict=False):
        if result is None or want is None:
            continue
        for factor, dim in _factor_parts(rule, result, want, mesh).items():
            for axis in (a for s in dim for a in s.axes):
                proposals[axis].append(Proposal(factor, Priority.HARD, dim, -1))
    for number, held in enumerate(operands):
        for axis in held.sharding.owed & sequence:
            if not (axis in passing and regroups and not proposals[axis]):
                found = _time_factor(rule, number, held.sharding, mesh, axis)
                if found:
                    proposals[axis].append(Proposal(found[0], Priority.SOFT, found[1], number))

    chosen: dict[str, Proposal] = {}
    for axis in mesh.names:
        best = _choose(rule, operands, parts, proposals[axis], axis, mesh, keep_storage, whole)
        if best is not None:
            chosen[axis] = best
    segments = {f: _structure(f, n, chosen, parts, rule, wanted, mesh) for f, n in rule.sizes.items()}
    for factor in rule.masked | rule.contiguous:
        # an offset must be one number, so a looked-up factor is cut in one piece or not at all
        segments[factor] = _contiguous(segments[factor], rule.sizes[factor], mesh)
    cut = {a for dim in segments.values() for s in dim for a in s.axes}

    owed_through = {axis for axis in passing if axis not in cut}
    targets = []
    for number, dims in enumerate(rule.operands):
        partial = frozenset((axis, "sum") for axis in owed_through if number in passing[axis])
        if number in rule.unread:
            partial = frozenset(p for p in operands[number].sharding.partial if p[0] not in cut)
        targets.append(Sharding(_dims(dims, segments), partial))
    results = tuple(None if r is None else _result(rule, r, segments, owed_through, mesh) for r in rule.results)
    return Decision(segments, tuple(targets), results, {a: p.priority for a, p in chosen.items()})


def _factor_parts(rule: Rule, dims: Dims, sharding: Sharding, mesh: Mesh) -> dict[str, Dim]:
    """The segments of each factor of a tensor; a dim whose cut straddles factors counts as uncut."""
    found: dict[str, Dim] = {}
    for factors, dim in zip(dims, sharding.dims, strict=True):
        parts = split(dim, tuple(rule.sizes[f] for f in factors), mesh)
        for i, factor in enumerate(factors):
            found[factor] = parts[i] if parts is not None else (Segment(rule.sizes[factor]),)
    return found


def _passing(rule: Rule, operands: tuple[Held, ...], mesh: Mesh) -> dict[str, frozenset[int]]:
    """The axes whose owed sums the op may carry through, with the operands that then owe.

    All operands of one linear group owe, and no other does. Over microbatches nothing can be paid
    before the last one, so there an operand that every microbatch has whole is made to owe.
    """
    passing = {}
    for axis in mesh.names:
        owing = frozenset(i for i, h in enumerate(operands) if axis in h.sharding.owed and i not in rule.unread)
        if not owing or any((axis, "sum") not in operands[i].sharding.partial for i in owing):
            continue
        for group in rule.linear:
            if group == owing or (axis == MICRO and owing <= group and _uncut(operands, group, axis)):
                passing[axis] = frozenset(group)
    return passing


def _uncut(operands: tuple[Held, ...], group: frozenset[int], axis: str) -> bool:
    return not any(axis in operands[i].sharding.axes for i in group)


def _time_factor(rule: Rule, number: int, sharding: Sharding, mesh: Mesh, axis: str) -> tuple[str, Dim] | None:
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


def _choose(
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


def _structure(
    factor: str,
    size: int,
    chosen: Mapping[str, Proposal],
    parts: list[dict[str, Dim]],
    rule: Rule,
    wanted: tuple[Sharding | None, ...],
    mesh: Mesh,
) -> Dim:
    """The segments of a factor that carry exactly the axes chosen for it."""
    axes = [a for a in mesh.names if a in chosen and chosen[a].factor == factor]
    if not axes:
        return (Segment(size),)
    candidates = [p[factor] for p in parts if factor in p] + [chosen[a].dim for a in axes]
    for dims, want in zip(rule.results, wanted, strict=False):
        if dims is not None and want is not None:
            found = _factor_parts(rule, dims, want, mesh)
            candidates += [found[factor]] if factor in found else []
    kept = [tuple(Segment(s.size, tuple(a for a in s.axes if a in axes)) for s in dim) for dim in candidates]

    def carried(dim: Dim) -> int:
        return sum(len(s.axes) for s in dim)

    best = max(kept, key=lambda dim: (carried(dim), len(dim)))
    for other in kept:
        # whoever has an axis that the best one lacks adds it, on the common refinement of both
        missing = [a for s in other for a in s.axes if not any(a in t.axes for t in best)]
        if not missing:
            continue
        pair = common_segments(best, other, mesh)
        if pair is None:
            continue
        best = tuple(
            Segment(s.size, s.axes + tuple(a for a in o.axes if a in missing)) for s, o in zip(*pair, strict=True)
        )
    return best


def _contiguous(dim: Dim, size: int, mesh: Mesh) -> Dim:
    cut = [i for i, s in enumerate(dim) if s.axes]
    if not cut:
        return (Segment(size),)
    joined = Segment(size, dim[cut[0]].axes)
    whole_first = math.prod(s.size for s in dim[: cut[0]]) == 1
    if len(cut) == 1 and whole_first and (len(dim) == 1 or not dim[cut[0]].padded(mesh)):
        return (joined,)
    return (Segment(size),)


def _dims(dims: Dims, segments: Mapping[str, Dim]) -> tuple[Dim, ...]:
    return tuple(tuple(s for f in factors for s in segments[f]) or (Segment(1),) for factors in dims)


def _result(rule: Rule, dims: Dims, segments: Mapping[str, Dim], owed_through: set[str], mesh: Mesh) -> Sharding:
    present = {f for factors in dims for f in factors}
    partial = {(axis, "sum") for axis in owed_through}
    for factor, dim in segments.items():
        if factor in present:
            continue
        reduction = rule.reduce.get(factor, "sum" if factor in rule.masked else None)
        for axis in (a for s in dim for a in s.axes):
            if reduction is not None:  # else the result does not depend on the factor
                partial.add((axis, reduction))
    return Sharding(_dims(dims, segments), frozenset(partial)).canonical(mesh)
