"""How one op is cut: from the shardings of its operands and its rule, the shardings it wants.

For every mesh axis one factor of the op is cut, or none (see :mod:`proposals`). Sums that are owed pass
through ops that are linear in whoever owes; otherwise they are paid on the way in.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from meshwright.compiler.mesh import MICRO, Dim, Mesh, Segment, Sharding
from meshwright.compiler.mesh_paths import common_segments
from meshwright.compiler.passes.proposals import Held, Priority, Proposal, choose, factor_parts, propose, time_factor
from meshwright.compiler.rules.rule import Dims, Rule


@dataclass(frozen=True)
class Decision:
    """How an op runs: the segments of every factor, the shardings of its operands and results."""

    segments: Mapping[str, Dim]
    operands: tuple[Sharding, ...]
    results: tuple[Sharding | None, ...]
    priority: Mapping[str, Priority]


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
    parts = [factor_parts(rule, dims, held.sharding, mesh) for dims, held in zip(rule.operands, operands, strict=True)]
    passing = _passing(rule, operands, mesh)
    proposals = propose(rule, operands, wanted, mesh)
    for number, held in enumerate(operands):
        for axis in held.sharding.owed & sequence:
            if not (axis in passing and regroups and not proposals[axis]):
                found = time_factor(rule, number, held.sharding, mesh, axis)
                if found:
                    proposals[axis].append(Proposal(found[0], Priority.SOFT, found[1], number))

    chosen: dict[str, Proposal] = {}
    for axis in mesh.names:
        best = choose(rule, operands, parts, proposals[axis], axis, mesh, keep_storage, whole)
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
            found = factor_parts(rule, dims, want, mesh)
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
