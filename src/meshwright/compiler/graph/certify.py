"""Proof by trial that an op's rule tells the truth: cut, run the shards, combine, compare with the whole.

:func:`certify` takes an op and example arguments and returns what was found: ``faults`` (the rule
says something false) and ``chances`` (the rule forbids something that would have worked).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from meshwright.compiler.graph.calls import describe, overload, run
from meshwright.compiler.mesh import Mesh, Segment
from meshwright.compiler.rules import rule_of
from meshwright.compiler.rules.arguments import unchanged
from meshwright.compiler.rules.rule import Dims, LocalCall, Offset, OpCall, Rule, Shards

TOLERANCE = 1e-12
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


def certify(op: OpOverload | str, *args: Any, **kwargs: Any) -> Findings:
    """Try all that the rule of ``op`` says on these arguments (float64 tensors, sizes coprime)."""
    target = overload(op) if isinstance(op, str) else op
    value = target(*args, **kwargs)
    call = describe(target, args, kwargs, value)
    rule = rule_of(call)
    if rule is None:
        return Findings(call, Rule({}, (), ()), (f"{call.name} has no rule",), (), 0)
    trial = _Trial(call, rule, _tensors([*args, *kwargs.values()]), _listed(value))
    faults = _structure(call, rule)
    if not faults:
        faults = [*trial.cuts(), *trial.linearity(), *trial.unread(), *trial.relations()]
    chances = [] if faults else trial.chances()
    return Findings(call, rule, tuple(faults), tuple(chances), trial.count)


def _structure(call: OpCall, rule: Rule) -> list[str]:
    """Whether the rule fits the shapes and says of each factor what becomes of it."""
    faults = []
    if len(rule.operands) != len(call.operands) or len(rule.results) != len(call.results):
        return [f"{len(call.operands)} operands and {len(call.results)} results, but the rule has others"]
    sides: list[tuple[str, Sequence[Any], Sequence[Dims | None]]] = [
        ("operand", call.operands, rule.operands),
        ("result", call.results, rule.results),
    ]
    for side, types, all_dims in sides:
        for i, (type_, dims) in enumerate(zip(types, all_dims, strict=True)):
            if (type_ is None) != (dims is None):
                faults.append(f"{side} {i} is missing in the op or in the rule")
            elif dims is not None and type_.shape != _shape(dims, rule.sizes):
                faults.append(f"{side} {i} has shape {type_.shape}, the rule says {_shape(dims, rule.sizes)}")
    inside = {f for dims in rule.operands for factors in dims for f in factors}
    out = {f for dims in rule.results if dims for factors in dims for f in factors}
    known = set(rule.sizes)
    for what, names in (("reduce", rule.reduce), ("whole", rule.whole), ("masked", rule.masked)):
        faults.extend(f"{what} names an unknown factor {f}" for f in set(names) - known)
    read = {f for n, dims in enumerate(rule.operands) if n not in rule.unread for factors in dims for f in factors}
    for f in sorted((inside & read) - out - set(rule.reduce) - rule.whole - rule.masked):
        faults.append(f"factor {f} vanishes without being reduced")
    for f in sorted((inside & read) - out):
        if rule.relations.get(f, "pointwise") == "pointwise":
            faults.append(f"factor {f} vanishes, so its relation cannot be pointwise")
    return faults


@dataclass
class _Trial:
    call: OpCall
    rule: Rule
    operands: list[Tensor]
    results: list[Tensor | None]
    count: int = 0

    # --- cuts

    def cuts(self) -> Iterator[str]:
        """Every cut that the rule allows: on 2, on 3, on 2 by 2, and two factors at once."""
        free = [f for f, size in self.rule.sizes.items() if f not in self.rule.whole and size > 1]
        for f in free:
            for axes in ((2,), (3,), (2, 2)):
                yield from self._fault({f: axes}, self.rule)
        for f, g in itertools.combinations(free, 2):
            yield from self._fault({f: (2,), g: (2,)}, self.rule)

    def _fault(self, cut: Cut, rule: Rule) -> Iterator[str]:
        self.count += 1
        told = ", ".join(f"{f} on {'*'.join(map(str, axes))}" for f, axes in cut.items())
        try:
            combined = self.combined(cut, rule)
        except Exception as error:
            yield f"cut {told}: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            return
        for i, (got, want) in enumerate(zip(combined, self.results, strict=True)):
            if want is not None and (message := difference(got, want)):
                yield f"cut {told}: result {i} {message}"

    def combined(self, cut: Cut, rule: Rule) -> list[Tensor | None]:
        """The results, put together from those of the shards."""
        axes = {f: tuple(f"{f}/{i}" for i in range(len(sizes))) for f, sizes in cut.items()}
        mesh = Mesh(tuple((a, size) for f, sizes in cut.items() for a, size in zip(axes[f], sizes, strict=True)))
        segments = {f: Segment(rule.sizes[f], axes[f]) for f in cut}
        local_sizes = {f: segments[f].local(mesh) if f in cut else size for f, size in rule.sizes.items()}
        parts = []
        for rank in range(mesh.ranks):
            bounds = {f: s.bounds(mesh, mesh.coordinates(rank)) for f, s in segments.items()}
            parts.append((bounds, self._on_shard(rule, local_sizes, bounds)))
        found: list[Tensor | None] = []
        for i, dims in enumerate(rule.results):
            if dims is None:
                found.append(None)
                continue
            pieces = [(bounds, results[i]) for bounds, results in parts]
            found.append(_assemble(rule, dims, local_sizes, pieces))
        return found

    def _on_shard(self, rule: Rule, sizes: Mapping[str, int], bounds: Mapping[str, tuple[int, int]]) -> list[Any]:
        operands = []
        for tensor, dims in zip(self.operands, rule.operands, strict=True):
            part = tensor
            for f, (start, valid) in bounds.items():
                part = _shard(part, dims, rule, f, start, valid, sizes)
            operands.append(part)
        shapes = tuple(None if dims is None else _shape(dims, sizes) for dims in rule.results)
        expanded = tuple(
            None
            if dims is None
            else (
                tuple(math.prod(rule.sizes[f] for f in factors) for factors in dims),
                tuple(Offset(factors[0]) if factors and factors[0] in bounds else 0 for factors in dims),
            )
            for dims in rule.results
        )
        shards = Shards(sizes, frozenset(bounds), shapes, tuple(tuple(p.shape) for p in operands), expanded)  # type: ignore[arg-type]  # an uncut segment starts at 0
        local = unchanged(self.call)
        if rule.local is not None:
            local = rule.local(self.call, local, shards)
        results = _listed(run(local, operands, lambda offset: bounds[offset.factor][0] if offset.factor in bounds else 0))
        for result, shape in zip(results, shapes, strict=True):
            if shape is not None and tuple(result.shape) != shape:
                raise ValueError(f"the shard's result is {tuple(result.shape)}, the rule says {shape}")
        return results

    # --- linearity

    def linearity(self) -> Iterator[str]:
        for group in self.rule.linear:
            self.count += 1
            if not group:
                yield "an empty linear group"
            elif message := self._nonlinear(group):
                yield f"not linear in operands {sorted(group)}: {message}"

    def _nonlinear(self, group: frozenset[int]) -> str:
        """Why the op is not linear in these operands together; '' if it is."""
        first, second = list(self.operands), list(self.operands)
        for n in group:
            if not self.operands[n].is_floating_point():
                return f"operand {n} is {self.operands[n].dtype}"
            first[n] = torch.randn(self.operands[n].shape, dtype=self.operands[n].dtype)
            second[n] = self.operands[n] - first[n]
        try:
            parts = _listed(self._whole(first)), _listed(self._whole(second))
        except Exception as error:
            return str(error)
        for one, two, want in zip(*parts, self.results, strict=True):
            if want is not None and want.dtype.is_floating_point:
                if message := difference(one + two, want):
                    return message
            elif want is not None and not torch.equal(one, want):
                return "an integer result changes"
            elif want is not None:
                return "a result does not depend on it, so its owed sum would be counted twice"
        return ""

    def _whole(self, operands: list[Tensor]) -> Any:
        return run(unchanged(self.call), operands, lambda _: 0)

    def unread(self) -> Iterator[str]:
        for n in self.rule.unread:
            self.count += 1
            changed = list(self.operands)
            changed[n] = _other(changed[n])
            for got, want in zip(_listed(self._whole(changed)), self.results, strict=True):
                if want is not None and difference(got, want):
                    yield f"operand {n} is read"

    # --- relations

    def relations(self) -> Iterator[str]:
        """Changing one position of an operand changes only results that the relation says read it."""
        for n, dims in enumerate(self.rule.operands):
            for f in sorted({f for factors in dims for f in factors}):
                against = self.rule.aligned.get(f, f)
                told = self.rule.relations.get(f, "pointwise")
                for i, result in enumerate(self.rule.results):
                    if result is None or not any(against in factors for factors in result):
                        continue
                    for p in sorted({0, self.rule.sizes[f] // 2, self.rule.sizes[f] - 1}):
                        self.count += 1
                        for q in self._changed(n, f, p, i, against):
                            if not reads(told, p, q):
                                yield f"result {i} at {against}={q} reads operand {n} at {f}={p}, not {told}"

    def _changed(self, n: int, f: str, p: int, i: int, against: str) -> list[int]:
        changed = list(self.operands)
        changed[n] = _perturbed(changed[n], self.rule.operands[n], self.rule.sizes, f, p)
        got, want = _listed(self._whole(changed))[i], self.results[i]
        result = self.rule.results[i]
        assert want is not None and result is not None
        same = _same(got, want).reshape([self.rule.sizes[g] for factors in result for g in factors])
        order = [g for factors in result for g in factors]
        per_position = same.movedim(order.index(against), 0).reshape(self.rule.sizes[against], -1).all(1)
        return [int(q) for q in torch.nonzero(~per_position).flatten()]

    # --- missed chances

    def chances(self) -> list[str]:
        """What the rule forbids and yet works on this example."""
        found = []
        for f in sorted(self.rule.whole):
            if self.rule.sizes[f] < 2:
                continue
            inside = any(f in factors for dims in self.rule.operands for factors in dims)
            absent = any(dims is not None and all(f not in d for d in dims) for dims in self.rule.results)
            for by in ("sum", "max", "min", "logsumexp") if absent and inside else ("",):
                looser = replace(
                    self.rule, whole=self.rule.whole - {f}, reduce={**self.rule.reduce, f: by} if by else self.rule.reduce
                )
                if all(not list(self._fault({f: (k,)}, looser)) for k in (2, 3)):
                    found.append(f"whole factor {f} can be cut" + (f", owing {by}" if by else ""))
        floats = [n for n, x in enumerate(self.operands) if x.is_floating_point() and n not in self.rule.unread]
        said = set(self.rule.linear)
        for count in (1, 2):
            for group in map(frozenset, itertools.combinations(floats, count)):
                if group not in said and not self._nonlinear(group):
                    found.append(f"linear in operands {sorted(group)}")
        return found


def reads(relation: str, p: int, q: int) -> bool:
    """Whether by this relation the result at position ``q`` may read the operand at position ``p``."""
    if relation in ("all", "data"):
        return True
    if relation == "prefix":
        return p <= q
    if relation == "suffix":
        return p >= q
    if relation == "pointwise":
        return p == q
    low, high = relation.strip("[]").split(",")
    return int(low) <= p - q <= int(high)


def difference(got: Tensor | None, want: Tensor) -> str:
    """What differs between two tensors beyond rounding; '' if nothing does."""
    if got is None or got.shape != want.shape:
        return f"has shape {None if got is None else tuple(got.shape)} instead of {tuple(want.shape)}"
    if got.dtype != want.dtype:
        return f"has dtype {got.dtype} instead of {want.dtype}"
    if bool(_same(got, want).all()):
        return ""
    return f"differs at {int((~_same(got, want)).sum())} of {want.numel()} places"


def _same(got: Tensor, want: Tensor) -> Tensor:
    if not (want.is_floating_point() or want.is_complex()):
        return got == want
    scale = want.abs()[torch.isfinite(want)].max() if torch.isfinite(want).any() else torch.ones(())
    tolerance = TOLERANCE if want.dtype in (torch.float64, torch.complex128) else 1e-5
    near = (got - want).abs() <= tolerance * torch.clamp(scale, min=1.0)
    return near | (got == want) | (torch.isnan(got) & torch.isnan(want))


def _shape(dims: Dims, sizes: Mapping[str, int]) -> tuple[int, ...]:
    return tuple(math.prod(sizes[f] for f in factors) for factors in dims)


def _over_factor(tensor: Tensor, dims: Dims, sizes: Mapping[str, int], f: str, change: Callable[[Tensor], Tensor]) -> Tensor:
    """The tensor with ``change`` (which works along dim 0) applied along every place of a factor."""
    for d, factors in enumerate(dims):
        for i, g in enumerate(factors):
            if g == f:
                before = math.prod(sizes[h] for h in factors[:i])
                after = math.prod(sizes[h] for h in factors[i + 1 :])
                split = tensor.unflatten(d, (before, tensor.shape[d] // (before * after), after))
                tensor = change(split.movedim(d + 1, 0)).movedim(0, d + 1).flatten(d, d + 2)
    return tensor


def _shard(
    tensor: Tensor,
    dims: Dims,
    rule: Rule,
    f: str,
    start: int,
    valid: int,
    sizes: Mapping[str, int],
) -> Tensor:
    """The shard of an operand; its padding is neutral if a result needs it so, else garbage."""
    missed = any(dims is not None and all(f not in d for d in dims) for dims in rule.results)
    neutral = missed and (f in rule.reduce or f in rule.masked)

    def cut(x: Tensor) -> Tensor:
        part = x.narrow(0, min(start, x.shape[0]), valid)
        missing = sizes[f] - valid
        if not missing:
            return part
        fill = x[:1].expand(missing, *x.shape[1:])
        if neutral:
            integral = not x.is_floating_point()
            fill = torch.full_like(fill, 0 if integral else rule.neutral(f))
        elif x.is_floating_point():
            fill = torch.full_like(fill, float("nan"))
        return torch.cat([part, fill])

    # the other cut factors have been or will be cut: sizes of this tensor as it stands are found by its shape
    present = dict(rule.sizes)
    for d, factors in enumerate(dims):
        for g in factors:
            if g != f and tensor.shape[d] != math.prod(present[h] for h in factors):
                present[g] = sizes[g]
    return _over_factor(tensor, dims, present, f, cut)


def _assemble(
    rule: Rule, dims: Dims, sizes: Mapping[str, int], pieces: list[tuple[Mapping[str, tuple[int, int]], Tensor]]
) -> Tensor:
    """One tensor from the shards': joined along factors that it has, reduced along those it lacks."""
    present = {f for factors in dims for f in factors}
    order = [f for factors in dims for f in factors]
    cut = list(pieces[0][0])
    kinds = {f: "sum" if f in rule.masked else rule.reduce.get(f, "same") for f in cut if f not in present}
    if len(kinds) > 1:  # along a factor that does not touch the result, one shard speaks for all
        pieces = [(b, p) for b, p in pieces if all(b[f][0] == 0 for f, kind in kinds.items() if kind == "same")]
    whole: dict[tuple[Any, ...], list[Tensor]] = {}
    for bounds, piece in pieces:
        part = piece.reshape([sizes[f] for f in order])
        for f in set(cut) & present:
            part = part.narrow(order.index(f), 0, bounds[f][1])
        whole.setdefault(tuple(bounds[f] for f in cut if f in present), []).append(part)
    made = torch.empty([rule.sizes[f] for f in order], dtype=pieces[0][1].dtype)
    for places, parts in whole.items():
        target = made
        for f, (start, valid) in zip([f for f in cut if f in present], places, strict=True):
            target = target.narrow(order.index(f), min(start, rule.sizes[f]), valid)
        target.copy_(_reduced(parts, set(kinds.values())))
    return made.reshape(_shape(dims, rule.sizes))


def _reduced(parts: list[Tensor], kinds: set[str]) -> Tensor:
    stacked = torch.stack(parts)
    kinds = kinds - {"same"} if len(kinds) > 1 else kinds
    if len(kinds) > 1:
        raise ValueError(f"two reductions at once: {sorted(kinds)}")
    kind = next(iter(kinds), "same")
    if kind == "sum":
        return stacked.sum(0).to(parts[0].dtype)
    if kind == "max":
        return stacked.amax(0)
    if kind == "min":
        return stacked.amin(0)
    if kind == "logsumexp":
        return torch.logsumexp(stacked, 0)
    if any(difference(p, parts[0]) for p in parts):
        raise ValueError("the shards' results should be the same and differ")
    return parts[0]


def _perturbed(tensor: Tensor, dims: Dims, sizes: Mapping[str, int], f: str, p: int) -> Tensor:
    """The tensor with all that stands at position ``p`` of a factor changed to other valid values."""

    def change(x: Tensor) -> Tensor:
        changed = x.clone()
        changed[p] = _other(x)[p]
        return changed

    return _over_factor(tensor, dims, sizes, f, change)


def _other(x: Tensor) -> Tensor:
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
