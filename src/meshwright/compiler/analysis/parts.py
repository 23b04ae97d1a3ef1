"""The kernels that an op of Meshwright's own runs: it is written in ops of torch, and each of them is launched apart.

How it is written is not told twice: its code is run on tensors without data, and what it calls is noted down.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx

from meshwright.compiler.analysis.strides import elements
from meshwright.compiler.graph.adapter import OpOverload, TorchDispatchMode, overload_name, written_in_ops
from meshwright.compiler.graph.dtypes import short_name
from meshwright.compiler.graph.ops.library import KERNELS
from meshwright.compiler.graph.ops.pieces import equal_ones_once
from meshwright.compiler.summary import Kernel, KernelKind

_WRITTEN = written_in_ops(torch.ops.aten.logsumexp.default)
"""Ops of torch that run several kernels themselves, and how they are written."""
Kind = Callable[[OpOverload], KernelKind]


def parts(node: fx.Node, kind: Kind) -> tuple[Kernel, ...]:
    """What the op of a node runs, views left out; empty for an op that is not written in others. ``kind`` tells that of
    an op of torch."""
    target = node.target
    if not isinstance(target, OpOverload) or target.namespace != "meshwright":
        return ()
    written = KERNELS.get(target._schema.name.partition("::")[2])
    if written is None:
        return ()
    called = _Called(kind)
    given, named = [_without_data(a) for a in node.args], {k: _without_data(v) for k, v in node.kwargs.items()}
    try:
        with torch.no_grad(), called, equal_ones_once(called.stand_for):
            written(*given, **named)
    except (NotImplementedError, RuntimeError):
        return ()  # what it does depends on values
    return tuple(called.kernels) if sum(k.times for k in called.kernels) > 1 else ()


def _without_data(value: Any) -> Any:
    if isinstance(value, fx.Node):
        value = value.meta.get("val", 0)
        if not isinstance(value, Tensor):
            return 0  # where a shard begins
    if isinstance(value, Tensor):
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
    return [_without_data(v) for v in value] if isinstance(value, (list, tuple)) else value


class _Called(TorchDispatchMode):
    """Notes every op that is called."""

    def __init__(self, kind: Kind) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch has no types here
        self.kernels: list[Kernel] = []
        self._kind = kind
        self._times = 1

    def stand_for(self, times: int) -> None:
        """What is called from now on is called so often."""
        self._times = times

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _WRITTEN:
            with self:
                return _WRITTEN[func](*args, **(kwargs or {}))
        result = func(*args, **(kwargs or {}))
        given = _tensors([*args, *(kwargs or {}).values()])
        made = _tensors([result])
        own = {id(t) for t in given}
        returns = func._schema.returns
        shares = any(r.alias_info is not None for r in returns)
        if shares and not any(r.alias_info is not None and r.alias_info.is_write for r in returns):
            return result  # a view
        if made and not (shares and not own):
            self.kernels.append(replace(self._kernel(func, given, made), times=self._times))
        return result

    def _kernel(self, func: OpOverload, given: Sequence[Tensor], made: Sequence[Tensor]) -> Kernel:
        read, written = sum(_bytes(t) for t in given), sum(_bytes(t) for t in made)
        floating = [t for t in (*given, *made) if t.is_floating_point()]
        dtype = short_name((floating or [*given, *made])[0].dtype)
        kind, count = self._kind(func), float(max(t.numel() for t in (*given, *made)))
        sizes: tuple[int, ...] = ()
        if kind == "matmul" and len(given) >= 2:
            a, b = given[-2:]
            if a.dim() == b.dim() == 1:  # a sum of products: bounded by what is read
                return Kernel(overload_name(func), "reduction", 2.0 * a.numel(), read, written, dtype, sizes)
            rows = a.shape[-2] if a.dim() > 1 else 1
            sizes = (math.prod(a.shape[:-2]), rows, b.shape[-1] if b.dim() > 1 else 1, a.shape[-1])
            count = 2.0 * math.prod(sizes)
        return Kernel(overload_name(func), kind, count, read, written, dtype, sizes)


def _bytes(x: Tensor) -> int:
    return elements(x.shape, x.stride()) * x.element_size()


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [t for v in value for t in _tensors(v)] if isinstance(value, (list, tuple)) else []
