"""Cutting real tensors by the factors of a rule, and putting the shards' results together again.

Used to certify rules: a cut is made with the very segments and padding of the partitioner.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from meshwright.compiler.rules.rule import Dims, Rule

Bounds = Mapping[str, tuple[int, int]]
"""Cut factor -> where the shard of one rank begins, and how many of its elements are not padding."""
TOLERANCE = 1e-12


def shape_of(dims: Dims, sizes: Mapping[str, int]) -> tuple[int, ...]:
    """The shape of a tensor whose factors have the given sizes."""
    return tuple(math.prod(sizes[f] for f in factors) for factors in dims)


def along(
    tensor: Tensor, dims: Dims, sizes: Mapping[str, int], factor: str, change: Callable[[Tensor], Tensor]
) -> Tensor:
    """The tensor with ``change``, which works along dim 0, applied along every place of a factor."""
    for d, factors in enumerate(dims):
        for i, f in enumerate(factors):
            if f == factor:
                before = math.prod(sizes[g] for g in factors[:i])
                after = math.prod(sizes[g] for g in factors[i + 1 :])
                shape = tensor.shape
                split = tensor.reshape(*shape[:d], before, shape[d] // (before * after), after, *shape[d + 1 :])
                tensor = change(split.movedim(d + 1, 0)).movedim(0, d + 1).flatten(d, d + 2)
    return tensor


def shard(tensor: Tensor, dims: Dims, rule: Rule, sizes: Mapping[str, int], bounds: Bounds) -> Tensor:
    """What one rank holds of an operand, ``sizes`` being the local sizes of all factors.

    Padding is neutral where a result reduces it, as the partitioner makes it; elsewhere it is NaN
    (for integers some value that occurs), so that whatever reads it shows.
    """
    present = dict(rule.sizes)
    for factor, (start, valid) in bounds.items():
        lacking = any(r is not None and all(factor not in fs for fs in r) for r in rule.results)
        neutral = rule.neutral(factor) if lacking and factor in {*rule.reduce, *rule.masked} else None

        def cut(
            x: Tensor, start: int = start, valid: int = valid, f: str = factor, fill: float | None = neutral
        ) -> Tensor:
            part = x.narrow(0, min(start, x.shape[0]), valid)
            padding = x[:1].expand(sizes[f] - valid, *x.shape[1:])
            if fill is not None:
                padding = torch.full_like(padding, fill if x.is_floating_point() or math.isfinite(fill) else 0)
            elif x.is_floating_point():
                padding = torch.full_like(padding, float("nan"))
            return torch.cat([part, padding])

        tensor = along(tensor, dims, present, factor, cut)
        present[factor] = sizes[factor]
    return tensor


def assemble(rule: Rule, dims: Dims, sizes: Mapping[str, int], pieces: Sequence[tuple[Bounds, Tensor]]) -> Tensor:
    """One result from the shards': joined along factors that it has, reduced along those it lacks.

    Raises ValueError where shards that should hold the same do not.
    """
    order = [f for factors in dims for f in factors]
    cut = [f for f in pieces[0][0] if f in order]
    kinds = {f: "sum" if f in rule.masked else rule.reduce.get(f, "same") for f in pieces[0][0] if f not in order}
    if len(kinds) > 1:  # along a factor that does not touch the result, one shard speaks for all
        pieces = [(b, p) for b, p in pieces if all(b[f][0] == 0 for f, kind in kinds.items() if kind == "same")]
    shards: dict[tuple[tuple[int, int], ...], list[Tensor]] = {}
    for bounds, piece in pieces:
        part = piece.reshape([sizes[f] for f in order])
        for f in cut:
            part = part.narrow(order.index(f), 0, bounds[f][1])
        shards.setdefault(tuple(bounds[f] for f in cut), []).append(part)
    made = torch.empty([rule.sizes[f] for f in order], dtype=pieces[0][1].dtype)
    for places, parts in shards.items():
        target = made
        for f, (start, valid) in zip(cut, places, strict=True):
            target = target.narrow(order.index(f), min(start, rule.sizes[f]), valid)
        target.copy_(_reduced(parts, set(kinds.values())))
    return made.reshape(shape_of(dims, rule.sizes))


def _reduced(parts: list[Tensor], kinds: set[str]) -> Tensor:
    kinds = kinds - {"same"} or kinds
    if len(kinds) > 1:
        raise ValueError(f"two reductions at once: {sorted(kinds)}")
    by: dict[str, Callable[[Tensor], Tensor]] = {
        "sum": lambda x: x.sum(0).to(x.dtype),
        "max": lambda x: x.amax(0),
        "min": lambda x: x.amin(0),
        "logsumexp": lambda x: torch.logsumexp(x, 0),
    }
    kind = next(iter(kinds), "same")
    if kind in by:
        return by[kind](torch.stack(parts))
    if any(difference(p, parts[0]) for p in parts):
        raise ValueError("the shards' results should be the same and differ")
    return parts[0]


def difference(got: Any, want: Tensor) -> str:
    """What differs between two tensors beyond rounding; '' if nothing does."""
    if not isinstance(got, Tensor) or got.shape != want.shape:
        return f"has shape {getattr(got, 'shape', None)} instead of {tuple(want.shape)}"
    if got.dtype != want.dtype:
        return f"has dtype {got.dtype} instead of {want.dtype}"
    wrong = int((~same(got, want)).sum())
    return f"differs at {wrong} of {want.numel()} places" if wrong else ""


def same(got: Tensor, want: Tensor) -> Tensor:
    """Where two tensors agree to rounding, relative to the largest element."""
    if not (want.is_floating_point() or want.is_complex()):
        return got == want
    finite = want.abs()[torch.isfinite(want)]
    scale = finite.max().clamp(min=1.0) if finite.numel() else 1.0
    tolerance = TOLERANCE if want.dtype in (torch.float64, torch.complex128) else 1e-5
    return ((got - want).abs() <= tolerance * scale) | (got == want) | (torch.isnan(got) & torch.isnan(want))
