"""The op rule: one record per op, read by sharding, cost, numerics and causality (RULES.md).

A rule writes an op as an einsum over named, sized *factors*. Every dim of every tensor operand
and result is a product of factors, major to minor; ``()`` is a dim of size 1 (broadcast).
What is not said follows from where a factor stands:

- in a result: the cut passes to that result;
- in operands only: it must be in ``reduce``, and a cut leaves that reduction owed;
- in one result but not in another: the other owes the reduction if the factor is in ``reduce``,
  and is not touched by a cut (every shard computes all of it) if the factor is not;
- in ``whole``: the kernel needs the dim entire, so it is never cut;
- in ``masked``: values are looked up along it; a cut operand (or result) is handled by ``local``
  with the shard's offset, and a result without the factor is then owed a sum;
- in a result only, and not ``whole``: a cut makes each shard its own part.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

Factors = tuple[str, ...]
"""The factors of one dim, major to minor."""

Dims = tuple[Factors, ...]
"""The dims of one tensor."""


@dataclass(frozen=True)
class TensorType:
    """What a rule may know of a tensor: its whole shape and its dtype's short name (``f32``)."""

    shape: tuple[int, ...]
    dtype: str = "f32"


@dataclass(frozen=True)
class OpCall:
    """One op applied once, free of torch.

    ``name`` is ``namespace.op.overload`` (``aten.add.Tensor``, ``meshwright.einsum.default``).
    ``args`` holds every positional parameter of the op's schema, defaults filled in, and ``kwargs``
    the keyword-only ones as given, with every tensor replaced by its :class:`TensorType`
    (lists of tensors stay lists). ``operands`` are those tensors in order of appearance,
    args before kwargs; ``results`` the tensors that the op returns (None where it returns none).
    """

    name: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    operands: tuple[TensorType, ...]
    results: tuple[TensorType | None, ...]
    pointwise: bool = False
    """Whether ATen tags the op as pointwise; such an op without a rule gets the pointwise one."""

    @cached_property
    def key(self) -> Hashable:
        """What makes two calls the same question: the op and its arguments, tensors by their types."""
        return self.name, _frozen(self.args), tuple([(k, _frozen(v)) for k, v in self.kwargs.items()])


def _frozen(value: Any) -> Hashable:
    if isinstance(value, (list, tuple)):
        return tuple([_frozen(v) for v in value])
    return (type(value), value) if isinstance(value, (bool, int, float)) else value


@dataclass(frozen=True)
class Offset:
    """In the arguments of a local call: where this rank's shard of a factor begins."""

    factor: str


@dataclass(frozen=True)
class LocalCall:
    """How a shard runs the op: possibly another op, with changed arguments.

    Tensors in ``args``/``kwargs`` are given as :class:`Operand` markers; ints as numbers or
    :class:`Offset`.
    """

    name: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


@dataclass(frozen=True)
class Operand:
    """Stands for the i-th tensor operand in the arguments of a :class:`LocalCall`."""

    index: int


@dataclass(frozen=True)
class Shards:
    """What a shard knows: the local size of each factor, and which factors are cut."""

    sizes: Mapping[str, int]
    cut: frozenset[str]
    result_shapes: tuple[tuple[int, ...] | None, ...]
    """The local shape of every result (padding included)."""
    operand_shapes: tuple[tuple[int, ...], ...]
    result_expanded: tuple[tuple[tuple[int, ...], tuple[Offset, ...]] | None, ...] = ()
    """Per result ``(global sizes, offsets)`` of its segments, for ops that need global indices."""


Local = Callable[[OpCall, LocalCall, Shards], LocalCall]
"""Given the op, the unchanged local call and the shards: the call that a rank makes."""


@dataclass(frozen=True)
class Rule:
    sizes: Mapping[str, int]
    """The size of every factor."""
    operands: tuple[Dims, ...]
    results: tuple[Dims | None, ...]
    reduce: Mapping[str, str] = field(default_factory=dict)
    """Factor -> ``sum``, ``max``, ``min`` or ``logsumexp``, for factors absent from some result."""
    whole: frozenset[str] = frozenset()
    masked: frozenset[str] = frozenset()
    linear: tuple[frozenset[int], ...] = ()
    """Groups of operands: an owed sum passes when all members of one group owe it, and only they."""
    relations: Mapping[str, str] = field(default_factory=dict)
    """Factor -> ``pointwise`` (default), ``all``, ``prefix``, ``suffix``, ``data`` or ``[l, u]``:
    which operand positions along the factor one result position reads. ``[l, u]`` is an interval of
    operand position minus result position."""
    aligned: Mapping[str, str] = field(default_factory=dict)
    """Operand factor -> result factor that its relation is told against, where the two are not the
    same factor (a slice shortens the dim; attention reads ``s`` of the keys from ``t`` of the queries)."""
    moves: Mapping[tuple[int, int], Mapping[int, int]] = field(default_factory=dict)
    """``(operand, result)`` -> dim -> operand position minus result position, of dims that are told by pieces above
    and of which one position of the result reads one of the operand, if it is not padding."""
    unread: frozenset[int] = frozenset()
    """Operands of which only the shape counts (``ones_like``): what they owe or hold never matters."""
    local: Local | None = None
    flops: float | None = None
    """Floating point operations of the whole op; None: one per element of the largest result."""
    contiguous: frozenset[str] = frozenset()
    """Factors of which ``local`` needs the offset: cut in one piece or not at all, as ``masked`` ones are."""
    indexed: bool = False
    """The op's values depend on the global index of each element (dropout): a shard runs it on a view with
    one dim per segment, and ``Shards.result_shapes[0]`` is the shape of that view."""
    dense: frozenset[int] = frozenset()
    """Operands whose memory the kernel walks without a look at strides: they are made contiguous first."""
    accumulates: frozenset[str] = frozenset()
    """Reduced factors (their sums are taken in the kernel's accumulator)."""
    ignored: Mapping[str, float] = field(default_factory=dict)
    """Reduced factors along which an element counts whatever it is, zero too: by factor, an element that does not."""

    def neutral(self, factor: str) -> float:
        """The element that padding along a reduced or masked factor must hold so as to change nothing."""
        if factor in self.ignored:
            return self.ignored[factor]
        if factor in self.masked:
            return 0.0
        return {"sum": 0.0, "max": float("-inf"), "min": float("inf"), "logsumexp": float("-inf")}[self.reduce[factor]]


RuleFunction = Callable[[OpCall], Rule]
REGISTRY: dict[str, RuleFunction] = {}


def rule(*names: str) -> Callable[[RuleFunction], RuleFunction]:
    """Register the function that gives the rule of the named ops.

    A name is ``namespace.op`` (all overloads) or ``namespace.op.overload``.
    """

    def register(function: RuleFunction) -> RuleFunction:
        for name in names:
            if name in REGISTRY:
                raise ValueError(f"{name} has two rules")
            REGISTRY[name] = function
        return function

    return register


def einsum(text: str, operands: tuple[TensorType, ...], **more: Any) -> Rule:
    """A rule written as ``"m k, k n -> m n"``; a dim of several factors as ``(h c)``, size 1 as ``1``.

    The sizes of single-factor dims come from the operands; others are given as ``sizes=``.
    """
    left, _, right = text.partition("->")
    sides = [[_dims(t) for t in side.split(",")] for side in (left, right)]
    sizes: dict[str, int] = dict(more.pop("sizes", {}))
    for dims, operand in zip(sides[0], operands, strict=True):
        for factors, size in zip(dims, operand.shape, strict=True):
            if len(factors) == 1:
                sizes.setdefault(factors[0], size)
    return Rule(sizes, tuple(sides[0]), tuple(sides[1]), **more)


def _dims(text: str) -> Dims:
    dims: list[Factors] = []
    group: list[str] | None = None
    for token in text.replace("(", " ( ").replace(")", " ) ").split():
        if token == "(":
            group = []
        elif token == ")":
            dims.append(tuple(group or ()))
            group = None
        elif group is not None:
            group.append(token)
        else:
            dims.append(() if token == "1" else (token,))
    return tuple(dims)
