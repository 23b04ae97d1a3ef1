"""One op: from what its operands see to what its results see, by the relations of its rule."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from meshwright.compiler.causality.second.moving import whole_dims
from meshwright.compiler.causality.second.seen import Along, Band, Seen, Span, moved
from meshwright.compiler.rules.rule import Dims, Rule

Key = tuple[str, int]
"""A part of a factor, by its number within the factor."""

JOINING = (
    "_softmax",
    "_safe_softmax",
    "_log_softmax",
    "native_layer_norm",
    "_fused_rms_norm",
    "native_group_norm",
    "native_batch_norm",
)
"""Ops each of whose results along a dim is made of all operands along it; others may just move them."""

LOW = -1e30
"""Numbers that mask as surely as minus infinity."""


@dataclass(frozen=True)
class Named:
    """An operand by the factors of the rule."""

    seen: Seen
    key_of: Mapping[int, Key]
    lost: frozenset[int]
    """Parts that no part of a factor is."""


def compose(rule: Rule, operands: Sequence[Seen], name: str) -> list[Seen | None]:
    """What each result sees."""
    return [
        None if rule.results[number] is None else _composed(whole_dims(rule, operands, number), operands, number, name)
        for number in range(len(rule.results))
    ]


def _composed(rule: Rule, operands: Sequence[Seen], number: int, name: str) -> Seen:
    sizes = finest(rule, operands)
    named = [named_by(seen, dims, rule, sizes) for seen, dims in zip(operands, rule.operands, strict=True)]
    bands = [b for one in named if (b := keyed(one.seen.band, one.key_of)) is not None]
    return _result(rule, named, bands, rule.results[number] or (), sizes, name)


def finest(rule: Rule, operands: Sequence[Seen]) -> dict[str, tuple[int, ...]]:
    """By factor the sizes of its parts, as finely as an operand has it."""
    found: dict[str, tuple[int, ...]] = {}
    for seen, dims in zip(operands, rule.operands, strict=True):
        for own, factors in zip(seen.dims, dims, strict=True):
            for factor, parts in _split(own, factors, rule):
                sizes = tuple(own[p] for p in parts)
                if len(sizes) > len(found.get(factor, ())):
                    found[factor] = sizes
    return found


def _split(own: Sequence[int], factors: Sequence[str], rule: Rule) -> list[tuple[str, list[int]]]:
    """The factors of a dim, as far as parts end where they end, each with the numbers of its parts."""
    made: list[tuple[str, list[int]]] = []
    at = 0
    for factor in factors:
        parts: list[int] = []
        while at < len(own) and math.prod(own[p] for p in parts) < rule.sizes[factor]:
            parts.append(at)
            at += 1
        if math.prod(own[p] for p in parts) != rule.sizes[factor]:
            break
        made.append((factor, parts))
    return made


def named_by(seen: Seen, dims: Dims, rule: Rule, sizes: Mapping[str, tuple[int, ...]]) -> Named:
    """Find for each part the part of a factor that it is."""
    key_of: dict[int, Key] = {}
    for own, numbers, factors in zip(seen.dims, seen.parts(), dims, strict=True):
        for factor, parts in _split(own, factors, rule):
            fine = sizes.get(factor, ())
            ends = [math.prod(fine[: j + 1]) for j in range(len(fine))]
            begin = 1
            for part in parts:  # where another operand takes a part apart, that part is lost, those beside it are not
                end = begin * own[part]
                if end in ends and fine[ends.index(end)] == own[part]:
                    key_of[numbers[part]] = (factor, ends.index(end))
                begin = end
    lost = {part for numbers in seen.parts() for part in numbers if part not in key_of}
    return Named(seen, key_of, frozenset(lost))


def keyed(band: Band | None, key_of: Mapping[int, Key]) -> tuple[Key, Key, Band] | None:
    if band is None or band.query not in key_of or band.key not in key_of:
        return None
    return key_of[band.query], key_of[band.key], band


def _result(
    rule: Rule,
    named: Sequence[Named],
    bands: Sequence[tuple[Key, Key, Band]],
    dims: Dims,
    sizes: Mapping[str, tuple[int, ...]],
    name: str,
) -> Seen:
    parts: dict[Key, int] = {}
    made_dims = []
    for factors in dims:
        own = []
        for factor in factors:
            for j, size in enumerate(sizes.get(factor, (rule.sizes[factor],))):
                if size > 1:
                    parts[factor, j] = len(parts)
                    own.append(size)
        made_dims.append(tuple(own))
    made = Seen(tuple(made_dims))
    for at, one in enumerate(named):
        if at in rule.unread:
            continue
        exact = one.seen.exact
        time, exact_time = _along(one.seen.time, one, rule, parts, bands, sizes, name)
        row, exact_row = _along(one.seen.row, one, rule, parts, bands, sizes, name)
        made = replace(
            made,
            time=made.time.union(time),
            row=made.row.union(row),
            exact=made.exact and exact and exact_time and exact_row,
        )
    return made


def _along(
    along: Along,
    one: Named,
    rule: Rule,
    parts: Mapping[Key, int],
    bands: Sequence[tuple[Key, Key, Band]],
    sizes: Mapping[str, tuple[int, ...]],
    name: str,
) -> tuple[Along, bool]:
    made, exact = Along(fixed=along.fixed, anywhere=along.anywhere), True
    for part, span in along.spans.items():
        if part in one.lost or part not in one.key_of:
            return Along(anywhere=True), False
        factor, j = one.key_of[part]
        relation = rule.relations.get(factor, "pointwise")
        target = rule.aligned.get(factor, factor)
        alone = len(sizes.get(factor, (0,))) == 1
        into = parts.get((target, j))
        if relation == "pointwise" and into is not None and target == factor:
            made = made.with_(into, span)
        elif relation in ("pointwise", "all"):
            masked = _masked((factor, j), span, parts, bands, name)
            made = made.with_(*masked) if masked is not None else replace(made, anywhere=True)
            exact = exact and (into is None or name.split(".")[1] in JOINING)
        elif into is None and alone and (index := _one(relation)) is not None:
            made, exact = made.union(Along(fixed=moved(span, (index, index)))), False
        elif relation == "data" or into is None or not alone:
            made, exact = replace(made, anywhere=True), False
        elif relation in ("prefix", "suffix"):
            made = made.with_(into, (-math.inf, span[1]) if relation == "prefix" else (span[0], math.inf))
        else:
            low, high = relation.strip("[]").split(",")
            made = made.with_(into, moved(span, (float(low), float(high))))
    return made, exact


def _one(relation: str) -> float | None:
    """The index that is taken of a dim, if it is one."""
    low, comma, high = relation.strip("[]").partition(",")
    return float(low) if comma and low == high else None


def _masked(
    key: Key, span: Span, parts: Mapping[Key, int], bands: Sequence[tuple[Key, Key, Band]], name: str
) -> tuple[int, Span] | None:
    """Where all positions along a part are joined, but a mask leaves an interval around the query."""
    attends = name.startswith("meshwright.attention")
    low = any(word in name for word in ("softmax", "logsumexp", "amax"))
    summed = any(word in name for word in ("einsum", "mm", "mv", "sum", "dot", "mean"))

    def brings_nothing(value: float) -> bool:
        return (low and value <= LOW) or (summed and value == 0) or (attends and value == -math.inf)

    for query, other, band in bands:
        for one, two, turned in ((query, other, band), (other, query, band.turned())):
            found = turned.filled(brings_nothing) if two == key else None
            if found is None or one not in parts:
                continue
            if low and not found.low <= 0 <= found.high:
                continue  # rows of which nothing is left
            return parts[one], moved(span, (found.low, found.high))
    return None
