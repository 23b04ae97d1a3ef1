"""Another global batch for a source: the same step, captured at other sizes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from meshwright.compiler.diagnostics import error
from meshwright.frontend.capture import batch as batches
from meshwright.frontend.source import Source


def widened(source: Source, samples: int) -> Source:
    """The source with an example batch of so many samples, on the meta device: shapes are all that capture needs.
    Tensors that all samples share stay as they are. Raises MeshwrightError E0442 for a number below 1."""
    if samples < 1:
        raise error("E0442", f"a global batch of {samples} samples", action="give at least 1")
    call = batches.as_call(source.batch)
    found = batches.tensors(call)
    _, dims = batches.batch_dims(found, source.batch_dims)
    made = {name: _resized(tensor, dims[name], samples) for name, tensor in found.items()}
    return replace(source, batch=_as_given(source.batch, batches.replace(call, made)), batch_dims=dims)


def samples_of(source: Source, tokens: int) -> int:
    """The samples that so many tokens make up: a sample has the elements of its largest integer tensor.

    Raises MeshwrightError E0442 if it has none, or the tokens do not fill whole samples.
    """
    found = batches.tensors(batches.as_call(source.batch))
    size, dims = batches.batch_dims(found, source.batch_dims)
    sizes = [t.numel() // size for n, t in found.items() if dims[n] is not None and not t.dtype.is_floating_point]
    each = max(sizes, default=0)
    if each < 2:  # one number for each sample is a label
        raise error("E0442", "the batch has no tokens", action="give the number of samples with --batch")
    if tokens < each or tokens % each:
        below, above = max(each, tokens // each * each), -(-max(tokens, 1) // each) * each
        near = f"{below} or {above}" if below < above else f"{above}"
        raise error(
            "E0442", f"{tokens} tokens are no whole number of samples of {each} tokens", action=f"give --tokens {near}"
        )
    return tokens // each


def _resized(tensor: Tensor, dim: int | None, samples: int) -> Tensor:
    if dim is None:
        return tensor
    shape = (*tensor.shape[:dim], samples, *tensor.shape[dim + 1 :])
    return torch.empty(shape, dtype=tensor.dtype, device="meta")


def _as_given(batch: Any, call: batches.Call) -> Any:
    """A call in the form in which the user gives batches."""
    if isinstance(batch, Tensor):
        return call.args[0]
    if isinstance(batch, Mapping):
        return call.kwargs
    return (call.args, call.kwargs) if call.kwargs else call.args
