"""What a call gives, found by a trial: on fake tensors, or, faster and without regard to devices, on meta tensors.

A trial depends on nothing but the op, its arguments and the types of its operands (for our own functions the mesh as
well), so each kind of call is tried once for all graphs, plans and models of a process.
"""

from __future__ import annotations

from collections.abc import Hashable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from meshwright.compiler.graph.adapter import OpOverload
from meshwright.compiler.graph.fake import fake_mode, fake_tensor
from meshwright.compiler.graph.pending import Pending
from meshwright.compiler.mesh import Mesh

_KNOWN: dict[Hashable, Any] = {}
_MOST = 100_000


def tensor(shape: tuple[int, ...], dtype: torch.dtype, meta: bool) -> Tensor:
    """A contiguous tensor without data; the same one each time when it is a meta tensor."""
    return _meta_tensor(shape, dtype) if meta else fake_tensor(shape, dtype)


@cache
def _meta_tensor(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def attempt(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], mesh: Mesh, meta: bool) -> Any:
    """What ``target`` returns. To be called with a communicator in place, and in fake mode unless ``meta``.

    Raises whatever the call raises.
    """
    where = None if isinstance(target, OpOverload) else mesh
    key = (meta, target, where, seen(args), seen(tuple(kwargs.items())))
    known = _KNOWN.get(key, _KNOWN)
    if known is not _KNOWN:
        return known
    result = _on_meta(target, args, kwargs) if meta else target(*args, **kwargs)
    if not isinstance(result, Pending) and not any(isinstance(a, Pending) for a in args):
        if len(_KNOWN) >= _MOST:
            _KNOWN.clear()
        _KNOWN[key] = result
    return result


def seen(value: Any) -> Hashable:
    """What a call on tensors without data depends on: types, shapes and strides; numbers and names as they are."""
    if isinstance(value, Tensor):
        return value.dtype, tuple(value.shape), value.stride(), value.device.type
    if isinstance(value, (list, tuple)):
        return tuple([seen(v) for v in value])
    return (type(value), value) if isinstance(value, (bool, int, float)) else value


_ALIKE: dict[Hashable, bool] = {}
"""By op and dtypes: whether meta tensors gave what fake ones gave when it was tried first. Some kernels differ by
device (statistics of a layer norm come in another dtype on the CPU)."""


def _on_meta(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if not isinstance(target, OpOverload):
        return target(*args, **kwargs)
    kind = (target, _dtypes(args), _dtypes(tuple(kwargs.values())))
    if kind not in _ALIKE:
        result = _on_fake(target, args, kwargs)
        try:
            _ALIKE[kind] = seen(_directly(target, args, kwargs)) == seen(result)
        except (NotImplementedError, RuntimeError):  # no kernel for meta tensors
            _ALIKE[kind] = False
        return result
    return _directly(target, args, kwargs) if _ALIKE[kind] else _on_fake(target, args, kwargs)


def _directly(target: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if _takes_device(target):
        kwargs = {**kwargs, "device": torch.device("meta")}
    return target(*args, **kwargs)


def _on_fake(target: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    with fake_mode():
        fake_args, fake_kwargs = _with_tensors(args, _as_fake), _with_tensors(kwargs, _as_fake)
        result = target(*fake_args, **fake_kwargs)
    return _with_tensors(result, _as_meta)


def _dtypes(value: Any) -> Hashable:
    if isinstance(value, Tensor):
        return value.dtype, value.dim()
    if isinstance(value, (list, tuple)):
        return tuple([_dtypes(v) for v in value])
    return type(value).__qualname__


@cache
def _takes_device(target: OpOverload) -> bool:
    return any(a.name == "device" and a.kwarg_only for a in target._schema.arguments)


def _with_tensors(value: Any, change: Any) -> Any:
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, dict):
        return {k: _with_tensors(v, change) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_with_tensors(v, change) for v in value)
    return value


def _as_fake(x: Tensor) -> Tensor:
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cpu")


def _as_meta(x: Tensor) -> Tensor:
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
