"""Proof by trial that an op's rule tells the truth: cut, run the shards, combine, compare with the whole.

:func:`certify` takes an op and example arguments and returns what was found: ``faults`` (the rule
says something false) and ``chances`` (the rule forbids something that would have worked).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from meshwright.compiler.graph.calls import describe, overload, run
from meshwright.compiler.graph.cutting import Bounds, along, assemble, difference, same, shape_of, shard
from meshwright.compiler.mesh import Mesh, Segment
from meshwright.compiler.rules import rule_of
from meshwright.compiler.rules.arguments import unchanged
from meshwright.compiler.rules.rule import Dims, Offset, OpCall, Rule, Shards

UNCHECKED = frozenset({"aten.convolution_backward.default", "aten.nll_loss_backward.default"})
"""Ops whose kernels trust what they are given: a cut that the rule forbids would write out of bounds."""
Cut = Mapping[str, tuple[int, ...]]
"""Factor -> the sizes of the mesh axes that cut it, outermost first."""


@dataclass(frozen=True)
class Findings:
    """What the trials of one example showed."""

    call: OpCall
    rule: Rule
    faults: tuple[str, ...]
    chances: tuple[str, ...]
    trials: int


def certify(op: str, *args: Any, **kwargs: Any) -> Findings:
    """Try all that the rule of ``op`` (``aten.add.Tensor``) says on these arguments.

    The tensors should be float64 and their sizes coprime, so that nothing agrees by accident.
    """
    return certify_rule(op, args, kwargs, None)


def certify_rule(op: str, args: Sequence[Any], kwargs: Mapping[str, Any], rule: Rule | None) -> Findings:
    """:func:`certify` with another rule than the op's own (None)."""
    target = overload(op)
    value = target(*args, **kwargs)
    call = describe(target, args, kwargs, value)
    rule = rule or rule_of(call)
    if rule is None:
        return Findings(call, Rule({}, (), ()), (f"{call.name} has no rule",), (), 0)
    faults = tuple(_structure(call, rule))
    if faults:
        return Findings(call, rule, faults, (), 0)
    trial = _Trial(call, rule, _tensors([*args, *kwargs.values()]), _listed(value))
    faults = (*trial.cuts(), *trial.linearity(), *trial.unread(), *trial.relations())
    chances = () if faults else tuple(trial.chances())
    return Findings(call, rule, faults, chances, trial.count)


def _structure(call: OpCall, rule: Rule) -> Iterator[str]:
    """Whether the rule fits the shapes and says of each factor what becomes of it."""
    if len(rule.operands) != len(call.operands) or len(rule.results) != len(call.results):
        yield f"{len(call.operands)} operands and {len(call.results)} results, but the rule has others"
        return
    sides: list[tuple[str, Sequence[Any], Sequence[Dims | None]]] = [
        ("operand", call.operands, rule.operands),
        ("result", call.results, rule.results),
    ]
    for side, types, all_dims in sides:
        for i, (type_, dims) in enumerate(zip(types, all_dims, strict=True)):
            if (type_ is None) != (dims is None):
                yield f"{side} {i} is missing in the op or in the rule"
            elif dims is not None and type_.shape != shape_of(dims, rule.sizes):
                yield f"{side} {i} has shape {type_.shape}, the rule says {shape_of(dims, rule.sizes)}"
    known = {*rule.sizes}
    for names in (
        rule.reduce,
        rule.whole,
        rule.masked,
        rule.contiguous,
        rule.relations,
        rule.aligned,
        rule.accumulates,
    ):
        yield from (f"the rule names an unknown factor {f}" for f in sorted(set(names) - known))
    read = {f for n, dims in enumerate(rule.operands) if n not in rule.unread for factors in dims for f in factors}
    gone = read - {f for dims in rule.results if dims for factors in dims for f in factors}
    for f in sorted(gone):
        if f not in {*rule.reduce, *rule.whole, *rule.masked}:
            yield f"factor {f} vanishes without being reduced"
        if rule.relations.get(f, "pointwise") == "pointwise":
            yield f"factor {f} vanishes, so its relation cannot be pointwise"


@dataclass
class _Trial:
    call: OpCall
    rule: Rule
    operands: list[Tensor]
    results: list[Any]
    count: int = 0

    def cuts(self) -> Iterator[str]:
        """Every cut that the rule allows: on 2, on 3, on 2 by 2, and two factors at once."""
        free = [f for f, size in self.rule.sizes.items() if f not in self.rule.whole and size > 1]
        for f in free:
            for axes in ((2,), (3,), (2, 2)):
                yield from self._faults({f: axes}, self.rule)
        for f, g in itertools.combinations(free, 2):
            yield from self._faults({f: (2,), g: (2,)}, self.rule)

    def _faults(self, cut: Cut, rule: Rule) -> Iterator[str]:
        self.count += 1
        told = ", ".join(f"{f} on {'*'.join(map(str, axes))}" for f, axes in cut.items())
        try:
            combined = self._combined(cut, rule)
        except Exception as error:  # whatever a kernel says of a shard that it cannot take
            yield f"cut {told}: {type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
            return
        for i, (got, want) in enumerate(zip(combined, self.results, strict=True)):
            if want is not None and (message := difference(got, want)):
                yield f"cut {told}: result {i} {message}"

    def _combined(self, cut: Cut, rule: Rule) -> list[Tensor | None]:
        """The results, put together from those of the shards."""
        axes = {f: tuple(f"{f}/{i}" for i in range(len(sizes))) for f, sizes in cut.items()}
        mesh = Mesh(tuple((a, size) for f, sizes in cut.items() for a, size in zip(axes[f], sizes, strict=True)))
        segments = {f: Segment(rule.sizes[f], axes[f]) for f in cut}
        sizes = {**rule.sizes, **{f: s.local(mesh) for f, s in segments.items()}}
        shards: list[tuple[Bounds, list[Any]]] = []
        for rank in range(mesh.ranks):
            bounds = {f: s.bounds(mesh, mesh.coordinates(rank)) for f, s in segments.items()}
            shards.append((bounds, self._on_shard(rule, sizes, bounds)))
        return [
            None if dims is None else assemble(rule, dims, sizes, [(b, results[i]) for b, results in shards])
            for i, dims in enumerate(rule.results)
        ]

    def _on_shard(self, rule: Rule, sizes: Mapping[str, int], bounds: Bounds) -> list[Any]:
        operands = []
        for n, (tensor, dims) in enumerate(zip(self.operands, rule.operands, strict=True)):
            part = shard(tensor, dims, rule, sizes, bounds)
            operands.append(part.contiguous() if n in rule.dense else part)
        shapes = tuple(None if dims is None else shape_of(dims, sizes) for dims in rule.results)
        expanded = tuple(None if dims is None else _places(dims, rule) for dims in rule.results)
        shards = Shards(sizes, frozenset(bounds), shapes, tuple(tuple(p.shape) for p in operands), expanded)
        local = unchanged(self.call)
        if rule.local is not None:
            local = rule.local(self.call, local, shards)
        results = _listed(run(local, operands, lambda o: bounds[o.factor][0] if o.factor in bounds else 0))
        for result, shape in zip(results, shapes, strict=True):
            if shape is not None and tuple(result.shape) != shape:
                raise ValueError(f"the shard's result is {tuple(result.shape)}, the rule says {shape}")
        return results

    def linearity(self) -> Iterator[str]:
        for group in self.rule.linear:
            self.count += 1
            if message := self._nonlinear(group):
                yield f"not linear in operands {sorted(group)}: {message}"

    def _nonlinear(self, group: frozenset[int]) -> str:
        """Why the op is not linear in these operands together; '' if it is."""
        first, second = list(self.operands), list(self.operands)
        for n in group:
            x = self.operands[n]
            if x.dtype == torch.bool:
                return f"operand {n} is boolean"
            first[n] = torch.randn_like(x) if x.is_floating_point() else torch.randint_like(x, -9, 9)
            second[n] = x - first[n]
        try:
            parts = self._whole(first), self._whole(second)
        except Exception as error:  # a part may lie outside of what the op accepts
            return str(error)
        for one, two, want in zip(*parts, self.results, strict=True):
            if want is not None and want.dtype == torch.bool:
                return "a result is boolean"
            if want is not None and (message := difference(one + two, want)):
                return message
        return "" if group else "the group is empty"

    def _whole(self, operands: list[Tensor]) -> list[Any]:
        return _listed(run(unchanged(self.call), operands, lambda _: 0))

    def unread(self) -> Iterator[str]:
        for n in self.rule.unread:
            self.count += 1
            changed = list(self.operands)
            changed[n] = _other(changed[n])
            for got, want in zip(self._whole(changed), self.results, strict=True):
                if want is not None and difference(got, want):
                    yield f"operand {n} is read"

    def relations(self) -> Iterator[str]:
        """Changing one position of an operand changes only results that the relation says read it."""
        for n, dims in enumerate(self.rule.operands):
            for f in sorted({f for factors in dims for f in factors if self.rule.sizes[f]}):
                for p in sorted({0, self.rule.sizes[f] // 2, self.rule.sizes[f] - 1}):
                    yield from self._wrong_readers(n, f, p)

    def _wrong_readers(self, n: int, f: str, p: int) -> Iterator[str]:
        self.count += 1
        relation, against = self.rule.relations.get(f, "pointwise"), self.rule.aligned.get(f, f)
        changed = list(self.operands)
        changed[n] = along(changed[n], self.rule.operands[n], self.rule.sizes, f, lambda x: _changed_at(x, p))
        for i, (got, dims) in enumerate(zip(self._whole(changed), self.rule.results, strict=True)):
            order = [g for factors in dims or () for g in factors]
            if against not in order:
                continue
            kept = same(got, self.results[i]).reshape([self.rule.sizes[g] for g in order])
            kept = kept.movedim(order.index(against), 0).reshape(self.rule.sizes[against], -1).all(1)
            for q in map(int, torch.nonzero(~kept).flatten()):
                if not reads(relation, p, q):
                    yield f"result {i} at {against}={q} reads operand {n} at {f}={p}, not {relation}"

    def chances(self) -> Iterator[str]:
        """What the rule forbids and yet works on this example."""
        looked_up = {f for f, relation in self.rule.relations.items() if relation == "data"}
        tried = set() if self.call.name in UNCHECKED else self.rule.whole - looked_up
        for f in sorted(f for f in tried if self.rule.sizes[f] > 1):
            inside = any(f in factors for dims in self.rule.operands for factors in dims)
            lacking = any(dims is not None and all(f not in d for d in dims) for dims in self.rule.results)
            for by in ("sum", "max", "min", "logsumexp") if lacking and inside else ("",):
                reduce = {**self.rule.reduce, f: by} if by else self.rule.reduce
                looser = replace(self.rule, whole=self.rule.whole - {f}, reduce=reduce)
                if not any([*self._faults({f: (2,)}, looser), *self._faults({f: (3,)}, looser)]):
                    yield f"whole factor {f} can be cut" + (f", owing {by}" if by else "")
        floats = [n for n, x in enumerate(self.operands) if x.is_floating_point() and n not in self.rule.unread]
        for count in (1, 2):
            for group in map(frozenset, itertools.combinations(floats, count)):
                if group not in self.rule.linear and not self._nonlinear(group):
                    yield f"linear in operands {sorted(group)}"


def reads(relation: str, p: int, q: int) -> bool:
    """Whether by this relation the result at position ``q`` may read the operand at position ``p``."""
    if relation in ("all", "data"):
        return True
    if relation in ("pointwise", "prefix", "suffix"):
        return p == q or (p < q if relation == "prefix" else p > q if relation == "suffix" else False)
    low, high = relation.strip("[]").split(",")
    return int(low) <= p - q <= int(high)


def _places(dims: Dims, rule: Rule) -> tuple[tuple[int, ...], tuple[Offset, ...]]:
    """Whole sizes and offsets of a result that has one segment per dim."""
    return shape_of(dims, rule.sizes), tuple(Offset(factors[0] if factors else "") for factors in dims)


def _changed_at(x: Tensor, p: int) -> Tensor:
    changed = x.clone()
    changed[p] = _other(x)[p]
    return changed


def _other(x: Tensor) -> Tensor:
    """Other values that the op accepts as well."""
    if x.dtype == torch.bool:
        return ~x
    if x.is_floating_point():
        return x * 0.7 + 0.1
    return x.max() + x.min() - x if x.numel() else x


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else [value]


def _tensors(values: Any) -> list[Tensor]:
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found.extend(_tensors(value))
    return found
