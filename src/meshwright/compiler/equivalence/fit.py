"""Is a rank's call the call of the step for one device, made on the shards? Decided by the op's rule.

The cut of every factor is read off the operands as they lie, and all operands must agree. From that follow, by the
rule, the call that a shard has to make, offsets included, and how its results lie and what they owe.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from meshwright.compiler.equivalence.indexed import same_elements
from meshwright.compiler.equivalence.layout import Layout, Mismatch, Owed, merged
from meshwright.compiler.equivalence.written import Strides, Written, expected
from meshwright.compiler.mesh import Dim, Mesh, Segment, Sharding, split
from meshwright.compiler.rules.arguments import unchanged
from meshwright.compiler.rules.rule import Dims, Offset, OpCall, Rule, Shards

Cuts = Mapping[str, Dim]
"""By factor: its segments."""


def fit(
    call: OpCall, rule: Rule, operands: Sequence[Layout], made: Written, hint: Sharding | None, mesh: Mesh
) -> tuple[Layout | None, ...]:
    """How the results of a rank's call lie, if it is ``call`` on the ranks' shards.

    ``hint`` says how a result may be cut along what no operand has (a table of zeros): any cut that fits is right
    there. Raises Mismatch if it is another call, or one on parts that do not belong together.
    """
    cuts = _cuts(rule, call, operands, mesh)
    _cut_results(rule, call, cuts, hint, mesh)
    _check_cuts(rule, cuts, mesh)
    _check_padding(rule, cuts, operands, mesh)
    through = _owed_through(rule, cuts, operands)
    results = tuple(
        None if dims is None else _result(rule, dims, cuts, through, mesh) for dims in rule.results
    )  # fmt: skip
    if rule.indexed and results[0] is not None:
        same_elements(call, made, operands[0], mesh)
        return (replace(results[0], shape=operands[0].shape),)
    _check_call(call, rule, cuts, operands, results, made, mesh)
    return results


def _cuts(rule: Rule, call: OpCall, operands: Sequence[Layout], mesh: Mesh) -> dict[str, Dim]:
    found: dict[str, Dim] = {}
    by: dict[str, int] = {}
    for number, (dims, layout) in enumerate(zip(rule.operands, operands, strict=True)):
        factors = [f for fs in dims for f in fs]
        parts = split(layout.segments, tuple(rule.sizes[f] for f in factors), mesh)
        if parts is None:
            if number in rule.unread and rule.results[0] != dims:
                continue
            raise Mismatch(
                f"{_op(call)} reads {layout.told(call.operands[number].shape, mesh)}, whose cut goes through what "
                "it keeps together"
            )
        own = {f: merged(part, mesh) if part else (Segment(1),) for f, part in zip(factors, parts, strict=True)}
        shape = tuple(math.prod(s.local(mesh) for f in fs for s in own[f]) for fs in dims)
        if shape != layout.shape and not (rule.indexed and number == 0):
            raise Mismatch(f"{_op(call)} reads a tensor of shape {list(layout.shape)}", "", str(list(shape)))
        for factor, part in own.items():
            if found.setdefault(factor, part) != part:
                raise Mismatch(
                    f"{_op(call)} combines parts that do not belong together: operand {by[factor]} is cut as "
                    f"{_told(found[factor])} where operand {number} is cut as {_told(part)}",
                    _told(part),
                    _told(found[factor]),
                )
            by.setdefault(factor, number)
    return found


def _cut_results(rule: Rule, call: OpCall, cuts: dict[str, Dim], hint: Sharding | None, mesh: Mesh) -> None:
    """The cut of factors that no operand has."""
    lacking = [f for f in rule.sizes if f not in cuts]
    if not lacking:
        return
    dims, first = rule.results[0], call.results[0]
    if hint is not None and dims is not None and first is not None and hint.shape == first.shape:
        for factors, dim in zip(dims, hint.dims, strict=True):
            real = tuple(Segment(s.size, tuple(a for a in s.axes if mesh.size(a) > 1)) for s in dim)
            parts = split(real, tuple(rule.sizes[f] for f in factors), mesh)
            for factor, part in zip(factors, parts or (), strict=False):
                if factor in lacking and part:
                    cuts[factor] = merged(part, mesh)
    for factor in lacking:
        cuts.setdefault(factor, (Segment(rule.sizes[factor]),))


def _check_cuts(rule: Rule, cuts: Cuts, mesh: Mesh) -> None:
    by: dict[str, str] = {}
    for factor, dim in cuts.items():
        axes = [a for s in dim for a in s.axes]
        if axes and factor in rule.whole:
            raise Mismatch(
                f"the op needs all of a dim that is cut as {_told(dim)}", _told(dim), str(rule.sizes[factor])
            )
        if axes and factor in rule.masked | rule.contiguous and not _one_piece(dim, mesh):
            raise Mismatch(f"a dim whose positions count is cut in pieces, {_told(dim)}")
        for axis in axes:
            if by.setdefault(axis, factor) != factor:
                raise Mismatch(f"'{axis}' cuts two dims of the op: only the parts on its diagonal are computed")


def _one_piece(dim: Dim, mesh: Mesh) -> bool:
    """Whether a rank's part is one stretch of the dim: what is outside of it has one element on each rank."""
    cut = [i for i, s in enumerate(dim) if s.axes]
    return all(s.local(mesh) == 1 for s in dim[: cut[-1]])


def _check_padding(rule: Rule, cuts: Cuts, operands: Sequence[Layout], mesh: Mesh) -> None:
    for factor, reduction in rule.reduce.items():
        for segment in cuts[factor]:
            if not segment.axes or not segment.padded(mesh):
                continue
            wanted = (segment.axes, rule.neutral(factor))
            for number, dims in enumerate(rule.operands):
                if any(factor in fs for fs in dims) and wanted not in operands[number].filled:
                    raise Mismatch(
                        f"the {reduction} over a dim that is cut as {segment} takes in padding, which is not filled"
                    )


def _owed_through(rule: Rule, cuts: Cuts, operands: Sequence[Layout]) -> Owed:
    """What the results owe because the operands do."""
    owing: dict[str, set[int]] = {}
    for number, layout in enumerate(operands):
        if number in rule.unread:
            continue
        for axis, reduction in layout.owed:
            owing.setdefault(axis, set()).add(number)
            if reduction != "sum":
                raise Mismatch(f"a value that owes the {reduction} over '{axis}' is read before it is paid")
    cut = {a for dim in cuts.values() for s in dim for a in s.axes}
    for axis, members in owing.items():
        if frozenset(members) not in rule.linear:
            which = f"operand {', '.join(map(str, sorted(members)))}" if len(rule.operands) > 1 else "its operand"
            raise Mismatch(f"the op is not linear in {which} alone, which owes a sum over '{axis}'", f"+{axis}", "paid")
        if axis in cut:
            raise Mismatch(f"a value that owes a sum over '{axis}' is combined with one that '{axis}' cuts")
    return frozenset((axis, "sum") for axis in owing)


def _result(rule: Rule, dims: Dims, cuts: Cuts, through: Owed, mesh: Mesh) -> Layout:
    present = {f for fs in dims for f in fs}
    owed = set(through)
    for factor, dim in cuts.items():
        reduction = rule.reduce.get(factor, "sum" if factor in rule.masked else None)
        if factor not in present and reduction is not None:
            owed |= {(a, reduction) for s in dim for a in s.axes}
    kinds: dict[str, str] = {}
    for axis, reduction in owed:
        if kinds.setdefault(axis, reduction) != reduction:
            raise Mismatch(f"two reductions at once are owed over '{axis}'")
    shape = tuple(math.prod(s.local(mesh) for f in fs for s in cuts[f]) for fs in dims)
    return Layout(merged((s for fs in dims for f in fs for s in cuts[f]), mesh), frozenset(owed), shape)


def _check_call(
    call: OpCall,
    rule: Rule,
    cuts: Cuts,
    operands: Sequence[Layout],
    results: tuple[Layout | None, ...],
    made: Written,
    mesh: Mesh,
) -> None:
    """Whether the call is what the rule says that a shard calls."""
    wanted = None
    for wanted in _right_calls(call, rule, cuts, operands, results, mesh):
        if wanted == made:
            return
    assert wanted is not None
    if wanted.name != made.name:
        raise Mismatch(f"{made.name} is called", made.name, wanted.name)
    pairs = [
        *zip(made.args, wanted.args, strict=False),
        *((dict(made.kwargs).get(k), v) for k, v in wanted.kwargs),
    ]
    found, right = next(((f, r) for f, r in pairs if f != r), (made.kwargs, wanted.kwargs))
    raise Mismatch(f"{_op(call)} is called with another argument", _argument(found), _argument(right))


def _right_calls(
    call: OpCall,
    rule: Rule,
    cuts: Cuts,
    operands: Sequence[Layout],
    results: tuple[Layout | None, ...],
    mesh: Mesh,
) -> Iterator[Written]:
    """The ways in which a shard may write the call: as it stands if nothing is cut; or as its rule writes it, be it
    that an axis of one rank cuts every factor."""
    cut = frozenset(f for f, dim in cuts.items() if any(s.axes for s in dim))
    plain = unchanged(call)
    if not cut or rule.local is None:
        yield expected(plain, lambda o: ())
    if rule.local is None:
        return

    def offset(place: Offset) -> Strides:
        dim = cuts[place.factor]
        found: list[tuple[str, int]] = []
        for i, segment in enumerate(dim):
            within = math.prod(s.size for s in dim[i + 1 :])
            found += [(a, c * within) for a, c in zip(segment.axes, segment.chunks(mesh), strict=True)]
        return tuple(found)

    for named in (cut, frozenset(rule.sizes)):
        shards = Shards(
            sizes={f: math.prod(s.local(mesh) for s in dim) for f, dim in cuts.items()},
            cut=named,
            result_shapes=tuple(None if r is None else r.shape for r in results),
            operand_shapes=tuple(o.shape for o in operands),
        )
        yield expected(rule.local(call, plain, shards), offset)


def _op(call: OpCall) -> str:
    return call.name.rpartition(".")[0]


def _told(dim: Dim) -> str:
    return "*".join(map(str, dim))


def _argument(value: object) -> str:
    strides = getattr(value, "strides", None)
    if strides is not None:
        return " + ".join(f"{axis} * {step}" for axis, step in strides)
    if isinstance(value, tuple):
        return f"[{', '.join(map(_argument, value))}]"
    return str(value)
