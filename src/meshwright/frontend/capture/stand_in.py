"""Fake parameters in place of real ones while the model is traced: no memory, and any compute dtype."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.compiler.graph.fake import fake_tensor
from meshwright.compiler.graph.program import Parameter, TensorSpec
from meshwright.compiler.plan import Precision

DTYPES = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


@dataclass(frozen=True)
class Casts:
    """The dtypes of a captured step; None: as the model has it."""

    compute: torch.dtype | None = None
    weights: torch.dtype | None = None
    reduce: torch.dtype | None = None


def casts(precision: Precision, model: nn.Module) -> Casts:
    """What a precision asks for. The default one leaves a model as it is."""
    if precision == Precision():
        return Casts()
    return Casts(DTYPES[precision.compute], DTYPES[precision.weights], DTYPES[precision.reduce])


def cast(dtype: torch.dtype, wanted: torch.dtype | None) -> torch.dtype:
    """``wanted`` where both are floating, else ``dtype``."""
    return wanted if wanted is not None and dtype.is_floating_point else dtype


def parameters(model: nn.Module, weights: torch.dtype | None) -> tuple[Parameter, ...]:
    """The logical parameters: a tied one is one parameter, named as first met, with its other names as aliases."""
    names: dict[int, list[str]] = {}
    tensors: dict[int, Tensor] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
        tensors[id(parameter)] = parameter
    return tuple(
        Parameter(
            first,
            TensorSpec(tuple(tensors[key].shape), cast(tensors[key].dtype, weights)),
            tensors[key].requires_grad,
            tuple(aliases),
            -1,
        )
        for key, (first, *aliases) in names.items()
    )


def buffers(model: nn.Module) -> dict[str, TensorSpec]:
    """Every buffer by name, non-persistent ones included."""
    return {n: TensorSpec(tuple(b.shape), b.dtype) for n, b in model.named_buffers(remove_duplicate=False)}


@contextlib.contextmanager
def stand_ins(model: nn.Module, compute: torch.dtype | None, cast_buffers: bool = False) -> Iterator[dict[str, Tensor]]:
    """Within the context the model's parameters and buffers are fake, on the CPU, ties kept. Yields them by name."""
    kept: list[tuple[nn.Module, str, bool, Tensor]] = []
    twins: dict[int, Any] = {}
    try:
        for module in model.modules():
            for name, parameter in list(module._parameters.items()):
                if parameter is None:
                    continue
                kept.append((module, name, True, parameter))
                if id(parameter) not in twins:
                    fake = fake_tensor(parameter.shape, cast(parameter.dtype, compute))
                    twins[id(parameter)] = nn.Parameter(fake, requires_grad=parameter.requires_grad)
                module._parameters[name] = twins[id(parameter)]
            for name, buffer in list(module._buffers.items()):
                if buffer is None:
                    continue
                kept.append((module, name, False, buffer))
                wanted = compute if cast_buffers else None
                if id(buffer) not in twins:
                    twins[id(buffer)] = fake_tensor(buffer.shape, cast(buffer.dtype, wanted))
                module._buffers[name] = twins[id(buffer)]
        found: dict[str, Tensor] = dict(model.named_parameters(remove_duplicate=False))
        found.update(model.named_buffers(remove_duplicate=False))
        yield found
    finally:
        for module, name, is_parameter, tensor in kept:
            kept_in: dict[str, Any] = module._parameters if is_parameter else module._buffers
            kept_in[name] = tensor
