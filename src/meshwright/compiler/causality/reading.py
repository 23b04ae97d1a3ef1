"""Sees what the user's own code reads off tensors (``if x.any()``, ``.item()``, ``.tolist()``): control that depends
on values. Also writes one-hot vectors in ops that compare, which torch writes in one that first reads."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from meshwright.compiler.causality.interpreter import Interpreter, Read
from meshwright.compiler.causality.places import user_place

READS: dict[Any, str] = {
    Tensor.item: "item()",
    Tensor.tolist: "tolist()",
    Tensor.__bool__: "bool()",
    Tensor.__int__: "int()",
    Tensor.__float__: "float()",
    Tensor.__index__: "an index",
    Tensor.numpy: "numpy()",
    Tensor.__array__: "numpy()",
    Tensor.__contains__: "in",
    Tensor.__repr__: "str()",
    Tensor.__format__: "format()",
    Tensor.__complex__: "complex()",
    Tensor.__dlpack__: "dlpack()",
    Tensor.__reduce_ex__: "pickle",
    Tensor.data_ptr: "data_ptr()",
    Tensor.untyped_storage: "its storage",
    Tensor.storage: "its storage",
    torch.equal: "equal()",
    torch.allclose: "allclose()",
    Tensor.equal: "equal()",
    Tensor.allclose: "allclose()",
    torch.is_nonzero: "bool()",
}


class Plainly(TorchFunctionMode):
    """One-hot vectors by comparison."""

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        return one_hot(*args, **kwargs) if function is F.one_hot else function(*args, **kwargs)


class Reading(Plainly):
    """Around an :class:`Interpreter`, whose notes get the reads of values that depend on tokens."""

    def __init__(self, interpreter: Interpreter) -> None:
        super().__init__()
        self.interpreter = interpreter

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if function in READS:
            for value in args[:2]:
                if isinstance(value, Tensor):
                    shadow = self.interpreter.listings.settle(self.interpreter.memory.read(value), value)
                    if shadow.deps is not None and not bool(shadow.known.all()) and bool(shadow.deps.any()):
                        self.interpreter.notes.reads.append(Read(user_place(), READS[function]))
        return super().__torch_function__(function, types, args, kwargs)


def one_hot(tensor: Tensor, num_classes: int = -1) -> Tensor:
    """``F.one_hot`` by comparison."""
    count = num_classes if num_classes >= 0 else int(tensor.max()) + 1
    return (tensor.unsqueeze(-1) == torch.arange(count, device=tensor.device)).to(torch.int64)
