"""What an export would see wrongly: a buffer that is assigned anew, ``.data``, and dropout in place."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from meshwright.compiler.diagnostics import error


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
    whose result is written back."""

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if function == torch.Tensor.data.__get__:  # type: ignore[attr-defined]  # a getter of a C property
            return args[0].detach()
        if function is F.dropout:
            return _dropout(*args, **(kwargs or {}))
        return function(*args, **(kwargs or {}))


def _dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    made = F.dropout(input, p, training)
    return input.copy_(made) if inplace and training else made
