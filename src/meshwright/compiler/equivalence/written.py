"""A rank's call as it is written, in a form that can be compared with what a rule says that a shard calls."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import fx

from meshwright.compiler.graph.adapter import OpOverload, overload_name
from meshwright.compiler.graph.calls import overload
from meshwright.compiler.rules.rule import LocalCall, Offset, Operand

Strides = tuple[tuple[str, int], ...]
"""Of an offset: the axes, and how far one step along each goes."""


@dataclass(frozen=True)
class Place:
    """An offset of this rank, as the program computes it."""

    strides: Strides


@dataclass(frozen=True)
class Written:
    """Op and arguments, every parameter of the schema in order, keyword-only ones by name."""

    name: str
    args: tuple[Hashable, ...]
    kwargs: tuple[tuple[str, Hashable], ...]


def written(node: fx.Node, places: Mapping[fx.Node, Place]) -> tuple[Written, tuple[fx.Node, ...]]:
    """A node's call, and its tensor operands in order of appearance. ``places`` are the nodes that are offsets."""
    assert isinstance(node.target, OpOverload)
    operands: list[fx.Node] = []

    def mark(value: Any) -> Hashable:
        if isinstance(value, fx.Node):
            if value in places:
                return places[value] if places[value].strides else 0
            operands.append(value)
            return Operand(len(operands) - 1)
        return _plain(value, mark)

    args = _positional(node.target, [mark(a) for a in node.args], dict(node.kwargs), mark)
    only = _keyword_only(node.target)
    kwargs = _named({k: mark(v) for k, v in node.kwargs.items() if k in only})
    return Written(overload_name(node.target), args, kwargs), tuple(operands)


def expected(call: LocalCall, offset: Callable[[Offset], Strides]) -> Written:
    """The same of a call that a rule gives, offsets put in."""

    def mark(value: Any) -> Hashable:
        if isinstance(value, Offset):
            strides = offset(value)
            return Place(strides) if strides else 0
        return _plain(value, mark)

    target = overload(call.name)
    args = _positional(target, [mark(a) for a in call.args], {}, mark)
    return Written(call.name, args, _named({k: mark(v) for k, v in call.kwargs.items()}))


def _named(given: Mapping[str, Hashable]) -> tuple[tuple[str, Hashable], ...]:
    """In which float a sum is taken is a matter of rounding, and left out."""
    return tuple(sorted((k, v) for k, v in given.items() if k != "dtype" or not (v is None or _is_float(v))))


def _is_float(value: Hashable) -> bool:
    return isinstance(value, torch.dtype) and value.is_floating_point


def _plain(value: Any, mark: Callable[[Any], Hashable]) -> Hashable:
    if isinstance(value, (list, tuple)):
        return tuple([mark(v) for v in value])
    return value  # type: ignore[no-any-return]  # a literal of a graph


def _positional(
    target: OpOverload, given: Sequence[Hashable], named: Mapping[str, Any], mark: Callable[[Any], Hashable]
) -> tuple[Hashable, ...]:
    found = list(given)
    for name, default in _parameters(target)[len(found) :]:
        found.append(mark(named.get(name, default)))
    return tuple(found)


@cache
def _parameters(target: OpOverload) -> tuple[tuple[str, Any], ...]:
    return tuple((a.name, a.default_value) for a in target._schema.arguments if not a.kwarg_only)


@cache
def _keyword_only(target: OpOverload) -> frozenset[str]:
    return frozenset(a.name for a in target._schema.arguments if a.kwarg_only)
