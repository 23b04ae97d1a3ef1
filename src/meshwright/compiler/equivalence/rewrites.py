"""How ops that are told sizes are written for other ones: shapes, ranges, and borders of slices, pads and splits."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from meshwright.compiler.equivalence.atoms import Atom, Dim, fix, longer, product, unify
from meshwright.compiler.rules.arguments import normal_dim
from meshwright.compiler.rules.rule import OpCall

Size = Callable[[Sequence[Atom]], int]
"""The new size of a dim."""
Rewrite = Callable[[list[Any], Size], list[Any]]
"""New positional arguments, all of the schema's being given."""
LITTLE = 2
"""Elements that may be cut off or added at an end of a dim of any size."""


def written_at(at: int, value: Callable[[Size], Any]) -> Rewrite:
    """The argument at a position written anew."""

    def rewrite(args: list[Any], size: Size) -> list[Any]:
        return [*args[:at], value(size), *args[at + 1 :]]

    return rewrite


def arange(call: OpCall, made: list[Dim]) -> Rewrite | None:
    """A range from 0 to the size of a dim; None for any other."""
    numbers = [a for a in call.args if isinstance(a, (int, float))]
    end = {"default": 0, "start": 1, "start_step": 1}.get(call.name.rpartition(".")[2])
    plain = end is not None and call.results[0] is not None and numbers[end] == call.results[0].shape[0]
    if not plain or (end == 1 and numbers[0] != 0) or numbers[2:] not in ([], [1]):
        return None
    return written_at(end or 0, lambda size: size(made[0]))


def shifted(op: str, call: OpCall, factors: Mapping[str, Dim], made: Any) -> Rewrite | None:
    """Slices, pads and splits: their borders are multiples of one size, which may change; how many of it may not. Where
    little is cut off or added, the dim is so much shorter or longer whatever its size."""
    if op == "constant_pad_nd":
        return _padded(call, factors, made)
    at = 1 if op == "slice" else 2
    shape = tuple(call.args[1]) if op == "slice_backward" else call.operands[0].shape
    dim = normal_dim(call.args[at], len(shape))
    name = f"d{dim}"
    if op in ("split", "split_with_sizes"):
        _fix_counts(factors, name)
        given = call.args[1]
        if isinstance(given, int):
            return written_at(1, lambda size: _scaled(factors, name, given, size))
        return written_at(1, lambda size: [_scaled(factors, name, n, size) for n in given])
    first, last, stride = call.args[at + 1 : at + 4]
    start, end, step = slice(first, last, stride).indices(shape[dim])
    if step != 1:
        return None
    front, back = start, shape[dim] - end
    if op == "slice" and _little(factors, name, front, back):
        made[dim] = shorter = longer(factors[f"{name}n"], -front - back)
        return lambda args, size: [*args[: at + 1], front, front + size(shorter), *args[at + 3 :]]
    if op == "slice_scatter" and _little(factors, name, front, back):
        short = factors[f"{name}n'"]
        unify(longer(factors[f"{name}n"], -front - back), short)
        return lambda args, size: [*args[:3], front, front + size(short), *args[5:]]
    if op == "slice_backward" and _little(factors, name, front, back):
        made[dim] = longer(factors[f"{name}n'"], front + back)
        short = factors[f"{name}n'"]
        return lambda args, size: [args[0], [size(d) for d in made], dim, front, front + size(short), *args[5:]]
    _fix_counts(factors, name)

    def rewrite(args: list[Any], size: Size) -> list[Any]:
        bounds = [_scaled(factors, name, n, size) for n in (start, end)]
        found = [*args[: at + 1], *bounds, *args[at + 3 :]]
        return found if op != "slice_backward" else [found[0], [size(d) for d in made], *found[2:]]

    return rewrite


def _padded(call: OpCall, factors: Mapping[str, Dim], made: Any) -> Rewrite:
    rank, amounts = len(call.operands[0].shape), call.args[1]
    kept: list[bool] = []
    for place in range(0, len(amounts), 2):
        dim = rank - 1 - place // 2
        before, after = amounts[place : place + 2]
        little = _little(factors, f"d{dim}", before, after)
        if little:
            made[dim] = longer(factors[f"d{dim}n"], before + after)
        else:
            _fix_counts(factors, f"d{dim}")
        kept += [little, little]

    def rewrite(args: list[Any], size: Size) -> list[Any]:
        names = [f"d{rank - 1 - i // 2}" for i in range(len(amounts))]
        scaled = [a if k else _scaled(factors, n, a, size) for n, a, k in zip(names, amounts, kept, strict=True)]
        return [args[0], scaled, *args[2:]]

    return rewrite


def _little(factors: Mapping[str, Dim], name: str, front: int, back: int) -> bool:
    return (
        name not in factors and f"{name}n" in factors and (front or back) != 0 and max(abs(front), abs(back)) <= LITTLE
    )


def _fix_counts(factors: Mapping[str, Dim], name: str) -> None:
    for factor, dim in factors.items():
        if factor.startswith((f"{name}n", f"{name}s")):
            fix(dim)


def _scaled(factors: Mapping[str, Dim], name: str, amount: int, size: Size) -> int:
    old = factors.get(name)
    return amount if old is None else amount // product(old) * size(old)
