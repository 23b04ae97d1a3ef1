"""What an export would see wrongly, or not at all: a buffer that is assigned anew, ``.data``, dropout in place, counts
and grouped products."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from meshwright.compiler.diagnostics import error
from meshwright.compiler.graph import ops as ops  # registers those that stand in


@contextlib.contextmanager
def buffers_written() -> Iterator[None]:
    """``module.buffer = value`` in forward writes the value into the buffer, which export then sees.

    Raises E0255 where the value has another shape or dtype than the buffer.
    """
    assign = nn.Module.__setattr__

    def written(self: nn.Module, name: str, value: Any) -> None:
        buffer = self.__dict__.get("_buffers", {}).get(name)
        if not isinstance(buffer, Tensor) or not isinstance(value, Tensor) or value is buffer:
            assign(self, name, value)
            return
        if value.shape != buffer.shape or value.dtype != buffer.dtype:
            raise error(
                "E0255",
                f"the buffer '{name}' {list(buffer.shape)} is assigned a tensor of another type {list(value.shape)}",
                None,
                "keep shape and dtype of buffers from step to step",
            )
        buffer.copy_(value)

    with mock.patch.object(nn.Module, "__setattr__", written):
        yield


class Plainly(TorchFunctionMode):
    """Reads ``x.data`` as ``x.detach()``, the same values without gradient, and does dropout in place as a dropout
    whose result is written back; counts into as many bins as are asked for, since a size that depends on data cannot
    be traced; and makes grouped products of any dtype, of which torch traces those in bf16 alone."""

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if function == torch.Tensor.data.__get__:  # type: ignore[attr-defined]  # a getter of a C property
            return args[0].detach()
        if function is F.dropout:
            return _dropout(*args, **(kwargs or {}))
        other = _BY_SIZE.get(function)
        made = other(*args, **(kwargs or {})) if other is not None else None
        if made is not None:
            return made
        return function(*args, **(kwargs or {}))


def _dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    made = F.dropout(input, p, training)
    return input.copy_(made) if inplace and training else made


def _count(input: Tensor, weights: Tensor | None = None, minlength: int = 0) -> Tensor | None:
    if weights is not None or not minlength:
        return None
    made: Tensor = torch.ops.meshwright.count(input, minlength)
    return made


def _grouped(
    x: Tensor, weight: Tensor, *, offs: Tensor | None = None, bias: Tensor | None = None, out_dtype: Any = None
) -> Tensor | None:
    plain = offs is not None and bias is None and out_dtype in (None, x.dtype)
    if not plain or (x.dim(), weight.dim()) != (2, 3):
        return None
    made: Tensor = torch.ops.meshwright.grouped_mm(x, weight, offs)
    return made


_BY_SIZE: dict[Any, Callable[..., Tensor | None]] = {
    torch.bincount: _count,
    Tensor.bincount: _count,
    F.grouped_mm: _grouped,
    torch._grouped_mm: _grouped,
}
"""What stands in for functions, where it can (else they give None)."""
