"""Reading and changing the arguments of a call: what rules need in order to write ``local``."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from meshwright.compiler.rules.rule import Local, LocalCall, OpCall, Operand, Shards, TensorType


def unchanged(call: OpCall) -> LocalCall:
    """The call as it stands, with :class:`Operand` markers for its tensors."""
    count = itertools.count()

    def mark(value: Any) -> Any:
        if isinstance(value, TensorType):
            return Operand(next(count))
        if isinstance(value, (list, tuple)):
            return type(value)(mark(v) for v in value)
        return value

    args = tuple(mark(a) for a in call.args)
    return LocalCall(call.name, args, {k: mark(v) for k, v in call.kwargs.items()})


def with_arguments(local: LocalCall, changes: Mapping[int, Any], name: str | None = None) -> LocalCall:
    """The local call with some positional arguments (by position), and perhaps the op, replaced."""
    args = tuple(changes.get(i, a) for i, a in enumerate(local.args))
    return replace(local, args=args, name=name or local.name)


def result_shape_at(position: int) -> Local:
    """A ``local`` that gives the local shape of the first result as the argument at ``position``."""

    def local(call: OpCall, unchanged: LocalCall, shards: Shards) -> LocalCall:
        return with_arguments(unchanged, {position: list(shards.result_shapes[0] or ())})

    return local


def operand_at(call: OpCall, position: int) -> int | None:
    """The operand number of the tensor at a position of ``call.args``; None if there is no tensor."""
    value = call.args[position] if position < len(call.args) else None
    if not isinstance(value, TensorType):
        return None
    return sum(_tensors(a) for a in call.args[:position])


def operands_at(call: OpCall, *positions: int) -> frozenset[int]:
    """The operand numbers of those of the given arguments that are tensors."""
    found = (operand_at(call, p) for p in positions)
    return frozenset(n for n in found if n is not None)


def _tensors(value: Any) -> int:
    if isinstance(value, TensorType):
        return 1
    return sum(map(_tensors, value)) if isinstance(value, (list, tuple)) else 0


def normal_dim(dim: int, ndim: int) -> int:
    """A dim counted from the front."""
    return dim + ndim if dim < 0 else dim


def normal_dims(dims: Iterable[int] | int | None, ndim: int) -> tuple[int, ...]:
    """Dims counted from the front; None and the empty list mean all of them, as in ``sum``."""
    if isinstance(dims, int):
        return (normal_dim(dims, max(ndim, 1)),)
    listed = tuple(normal_dim(d, max(ndim, 1)) for d in dims or ())
    return listed or tuple(range(ndim))
