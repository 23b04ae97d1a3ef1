"""Parts of a dim: slice, select, split, unbind, pad, cat, stack, their backwards, roll and flip.

A dim of ``n * m`` cut at multiples of ``m`` is ``(n m)`` with ``n`` whole: each shard takes the same
pieces of its own ``m``. So the fused q, k, v of an attention stay cut by heads. Where no such ``m`` is
left (``[1:]``), the dim is whole.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from meshwright.compiler.rules.arguments import normal_dim, normal_dims, with_arguments
from meshwright.compiler.rules.dims import all_whole, named
from meshwright.compiler.rules.rule import Dims, Factors, LocalCall, OpCall, Rule, Shards, rule

FIRST = (frozenset({0}),)


@dataclass
class Draft:
    """A rule in the making: what :func:`shift` and its callers note down."""

    sizes: dict[str, int] = field(default_factory=dict)
    whole: set[str] = field(default_factory=set)
    relations: dict[str, str] = field(default_factory=dict)
    aligned: dict[str, str] = field(default_factory=dict)

    def factors(self, *pairs: tuple[str, int]) -> Factors:
        """The given factors without those of size 1."""
        self.sizes.update({name: size for name, size in pairs if size != 1})
        return tuple(name for name, size in pairs if size != 1)

    def rule(self, operands: Sequence[Dims], results: Sequence[Dims | None], **more: Any) -> Rule:
        return Rule(
            self.sizes,
            tuple(operands),
            tuple(results),
            whole=frozenset(self.whole & set(self.sizes)),
            relations={f: r for f, r in self.relations.items() if f in self.sizes},
            aligned={f: t for f, t in self.aligned.items() if f in self.sizes and t in self.sizes},
            **more,
        )


def shift(draft: Draft, name: str, size: int, before: int, after: int) -> tuple[Factors, Factors]:
    """A dim grown by ``before`` in front and ``after`` behind (less than zero: cut off).

    ``(n m) -> (n' m)`` with the largest ``m`` that all borders are multiples of; ``n`` and ``n'`` are whole.
    """
    if before == after == 0:
        same = draft.factors((name, size))
        return same, same
    step = math.gcd(size, before, after)
    old, new = f"{name}n", f"{name}n'"
    operand = draft.factors((old, size // step), (name, step))
    result = draft.factors((new, (size + before + after) // step), (name, step))
    draft.whole |= {old, new}
    draft.relations[old] = f"[{-before // step},{-before // step}]"
    draft.aligned[old] = new
    return operand, result


def _replaced(dims: Dims, at: int, *factors: Factors) -> Dims:
    return (*dims[:at], *factors, *dims[at + 1 :])


@rule("aten.slice.Tensor", "aten.narrow", "aten.slice_backward", "aten.slice_scatter")
def slice_(call: OpCall) -> Rule:
    """``slice(x, dim, start, end, step)``; backward and scatter are told with the two sides changed."""
    op = call.name.split(".")[1]
    if op == "slice_backward":
        shape, (dim, start, end, step) = tuple(call.args[1]), call.args[2:6]
    elif op == "slice_scatter":
        shape, (dim, start, end, step) = call.operands[0].shape, call.args[2:6]
    elif op == "narrow":
        shape, (dim, start, length) = call.operands[0].shape, call.args[1:4]
        end, step = normal_dim(start, shape[normal_dim(dim, len(shape))]) + length, 1
    else:
        shape, (dim, start, end, step) = call.operands[0].shape, call.args[1:5]
    dim = normal_dim(dim, len(shape))
    size = shape[dim]
    start, end, step = slice(start, end, step).indices(size)
    length = len(range(start, end, step))
    if size == 0 or length == 0:
        return all_whole(call)

    draft = Draft()
    large = named(shape, "d", draft.sizes)
    draft.sizes.pop(f"d{dim}", None)
    name = f"d{dim}"
    if step == 1:
        long, short = shift(draft, name, size, -start, start + length - size)
    elif size % step == 0 and length * step == size:
        long, short = draft.factors((name, length), (f"{name}s", step)), draft.factors((name, length))
        draft.whole.add(f"{name}s")
        draft.relations[f"{name}s"] = f"[{start},{start}]"
    else:
        long, short = draft.factors((f"{name}n", size)), draft.factors((f"{name}n'", length))
        draft.whole |= {f"{name}n", f"{name}n'"}
        draft.relations[f"{name}n"] = "all"
    large, small = _replaced(large, dim, long), _replaced(large, dim, short)

    def bounds(shards: Shards) -> tuple[int, int]:
        """Start and end in a shard."""
        if step != 1:
            return start, math.prod(shards.sizes[f] for f in long)
        if long == short:
            return 0, math.prod(shards.sizes[f] for f in long)
        unit, local_unit = (draft.sizes.get(name, 1), shards.sizes.get(name, 1))
        return start // unit * local_unit, (start + length) // unit * local_unit

    def local(call: OpCall, unchanged: LocalCall, shards: Shards) -> LocalCall:
        first, last = bounds(shards)
        x = unchanged.args[0]
        if op == "slice_backward":
            sizes = list(shards.result_shapes[0] or ())
            return LocalCall(call.name, (x, sizes, dim, first, last, step), {})
        if op == "slice_scatter":
            return LocalCall(call.name, (x, unchanged.args[1], dim, first, last, step), {})
        return LocalCall("aten.slice.Tensor", (x, dim, first, last, step), {})

    if op == "slice_backward":
        _turn(draft)
        return draft.rule([small], [large], linear=FIRST, local=local)
    if op == "slice_scatter":
        draft.relations.update({f"{name}n'": "all"} if f"{name}n'" in draft.sizes else {})
        draft.relations.pop(f"{name}n", None)
        draft.aligned.clear()
        return draft.rule([large, small], [large], linear=(frozenset({0, 1}),), local=local)
    moves = {(0, 0): {dim: start}} if step == 1 else {}
    return draft.rule([large], [small], linear=FIRST, local=local, moves=moves)


def _turn(draft: Draft) -> None:
    """Relations of the op that goes the other way: the result's factors become the operand's."""
    aligned, relations = dict(draft.aligned), dict(draft.relations)
    draft.aligned, draft.relations = {}, {}
    for old, new in aligned.items():
        low, comma, high = relations[old].strip("[]").partition(",")
        draft.aligned[new] = old
        draft.relations[new] = f"[{-int(high)},{-int(low)}]" if comma else "all"


@rule("aten.select.int", "aten.unbind")
def select(call: OpCall) -> Rule:
    shape = call.operands[0].shape
    dim = normal_dim(call.args[1], len(shape))
    draft = Draft()
    dims = named(shape, "d", draft.sizes)
    draft.whole.add(f"d{dim}")
    draft.relations[f"d{dim}"] = "all"
    if call.name.startswith("aten.select"):
        index = normal_dim(call.args[2], shape[dim])
        draft.relations[f"d{dim}"] = f"[{index},{index}]"
    return draft.rule([dims], [_replaced(dims, dim)] * len(call.results), linear=FIRST)


@rule("aten.select_backward", "aten.select_scatter")
def select_backward(call: OpCall) -> Rule:
    """The selected place of a tensor of zeros, or of a given tensor, is filled."""
    scatter = call.name.startswith("aten.select_scatter")
    shape = call.operands[0].shape if scatter else tuple(call.args[1])
    dim = normal_dim(call.args[2], len(shape))
    draft = Draft()
    dims = named(shape, "d", draft.sizes)
    draft.whole.add(f"d{dim}")
    small = _replaced(dims, dim)
    if scatter:
        return draft.rule([dims, small], [dims], linear=(frozenset({0, 1}),))

    def local(call: OpCall, unchanged: LocalCall, shards: Shards) -> LocalCall:
        return with_arguments(unchanged, {1: list(shards.result_shapes[0] or ())})

    return draft.rule([small], [dims], linear=FIRST, local=local)


@rule("aten.split", "aten.split_with_sizes", "aten.chunk", "aten.split_copy", "aten.split_with_sizes_copy")
def split(call: OpCall) -> Rule:
    """Pieces of one dim, each a multiple of the largest common ``m``."""
    shape = call.operands[0].shape
    dim = normal_dim(call.args[2], len(shape))
    pieces = [r.shape[dim] for r in call.results if r is not None]
    draft = Draft()
    dims = named(shape, "d", draft.sizes)
    name = f"d{dim}"
    draft.sizes.pop(name, None)
    step = math.gcd(*pieces)
    if step == 0:
        return all_whole(call)
    operand = draft.factors((f"{name}n", shape[dim] // step), (name, step))
    results = []
    draft.whole.add(f"{name}n")
    draft.relations[f"{name}n"] = "all"
    for piece in pieces:
        part = f"{name}n{piece // step}"
        results.append(_replaced(dims, dim, draft.factors((part, piece // step), (name, step))))
        draft.whole.add(part)

    def local(call: OpCall, unchanged: LocalCall, shards: Shards) -> LocalCall:
        unit = shards.sizes.get(name, 1)
        sizes = [piece // step * unit for piece in pieces]
        return LocalCall("aten.split_with_sizes.default", (unchanged.args[0], sizes, dim), {})

    starts = [sum(pieces[:number]) for number in range(len(pieces))]
    moves = {(0, number): {dim: start} for number, start in enumerate(starts)}
    return draft.rule([_replaced(dims, dim, operand)], results, linear=FIRST, local=local, moves=moves)


@rule("aten.cat", "aten.concat")
def cat(call: OpCall) -> Rule:
    """The pieces' dim is ``(n_i m)``, the result's ``(N m)``."""
    shapes = [t.shape for t in call.operands]
    first = call.results[0]
    if first is None or len({len(s) for s in shapes}) != 1:
        return all_whole(call)  # cat skips tensors of shape [0]
    dim = normal_dim(call.args[1] if len(call.args) > 1 else 0, len(first.shape))
    step = math.gcd(*(s[dim] for s in shapes))
    if step == 0:
        return all_whole(call)
    draft = Draft()
    dims = named(first.shape, "d", draft.sizes)
    name = f"d{dim}"
    draft.sizes.pop(name, None)
    result = draft.factors((f"{name}n'", first.shape[dim] // step), (name, step))
    draft.whole.add(f"{name}n'")
    operands, start, moves = [], 0, {}
    for i, shape in enumerate(shapes):
        part, count = f"{name}n{i}", shape[dim] // step
        operands.append(_replaced(dims, dim, draft.factors((part, count), (name, step))))
        draft.whole.add(part)
        draft.relations[part] = f"[{-start},{-start}]"
        draft.aligned[part] = f"{name}n'"
        moves[i, 0] = {dim: -start * step}
        start += count
    linear = (frozenset(range(len(shapes))),)
    return draft.rule(operands, [_replaced(dims, dim, result)], linear=linear, moves=moves)


@rule("aten.stack")
def stack(call: OpCall) -> Rule:
    first = call.results[0]
    if first is None:
        return all_whole(call)
    dim = normal_dim(call.args[1] if len(call.args) > 1 else 0, len(first.shape))
    draft = Draft()
    dims = named(first.shape, "d", draft.sizes)
    draft.whole.add(f"d{dim}")
    operands = [_replaced(dims, dim)] * len(call.operands)
    return draft.rule(operands, [dims], linear=(frozenset(range(len(operands))),))


@rule("aten.constant_pad_nd")
def pad(call: OpCall) -> Rule:
    """Padding (or cropping, where negative) by multiples of ``m`` keeps ``m`` free."""
    shape, amounts = call.operands[0].shape, list(call.args[1])
    draft = Draft()
    operand: list[Factors] = []
    result: list[Factors] = []
    moves: dict[int, int] = {}
    for dim, size in enumerate(shape):
        at = 2 * (len(shape) - 1 - dim)
        before, after = amounts[at : at + 2] if at < len(amounts) else (0, 0)
        if size == 0 or size + before + after <= 0:
            return all_whole(call)
        old, new = shift(draft, f"d{dim}", size, before, after)
        operand.append(old)
        result.append(new)
        if before or after:
            moves[dim] = -before

    def local(call: OpCall, unchanged: LocalCall, shards: Shards) -> LocalCall:
        scaled = []
        for i, amount in enumerate(amounts):
            name = f"d{len(shape) - 1 - i // 2}"
            scaled.append(amount // draft.sizes.get(name, 1) * shards.sizes.get(name, 1))
        return with_arguments(unchanged, {1: scaled})

    linear = FIRST if len(call.args) < 3 or call.args[2] == 0 else ()
    return draft.rule([tuple(operand)], [tuple(result)], linear=linear, local=local, moves={(0, 0): moves})


@rule("aten.roll", "aten.flip", "aten.tril", "aten.triu")
def moved(call: OpCall) -> Rule:
    """Elements move within some dims, or are kept by their place: those are whole, the others pass."""
    shape = call.operands[0].shape
    op = call.name.split(".")[1]
    if op in ("tril", "triu"):
        dims: tuple[int, ...] = (len(shape) - 2, len(shape) - 1)
    else:
        dims = normal_dims(call.args[1] if op == "flip" else call.args[2], len(shape))
    draft = Draft()
    operand = named(shape, "d", draft.sizes)
    draft.whole.update(f"d{d}" for d in dims)
    if op in ("roll", "flip"):
        draft.relations.update({f"d{d}": "all" for d in dims})
    return draft.rule([operand], [operand], linear=FIRST)


@rule("aten.diagonal", "aten.unfold", "aten.diag_embed")
def windowed(call: OpCall) -> Rule:
    """Dims of the result that are not one dim of the operand are whole, and so are those they come from."""
    shape, first = call.operands[0].shape, call.results[0]
    if first is None:
        return all_whole(call)
    op = call.name.split(".")[1]
    draft = Draft()
    dims = named(shape, "d", draft.sizes)
    if op == "unfold":
        gone = {normal_dim(call.args[1], len(shape))}
        (dim,) = gone
        window = draft.factors((f"d{dim}n", first.shape[dim])), draft.factors((f"d{dim}w", first.shape[-1]))
        result = (*_replaced(dims, dim, window[0]), window[1])
        made = {f"d{dim}n", f"d{dim}w"}
    elif op == "diagonal":
        gone = {normal_dim(d, len(shape)) for d in call.args[2:4]}
        result = (*(f for i, f in enumerate(dims) if i not in gone), draft.factors(("diagonal", first.shape[-1])))
        made = {"diagonal"}
    else:
        places = sorted(normal_dim(d, len(first.shape)) for d in call.args[2:4])
        gone, made = {len(shape) - 1}, {"row", "column"}
        rest = list(dims[:-1])
        for name, place in zip(("row", "column"), places, strict=True):
            rest.insert(place, draft.factors((name, first.shape[place])))
        result = tuple(rest)
    draft.whole.update({f"d{d}" for d in gone} | made)
    draft.relations.update({f"d{d}": "all" for d in gone})
    return draft.rule([dims], [result], linear=FIRST)
