"""Convolutions and pooling: the same op, run on the bits of the sets, with ones for weights."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from meshwright.compiler.causality.call import Call, tensors_in
from meshwright.compiler.causality.registry import rule
from meshwright.compiler.causality.shadow import Shadow, constant
from meshwright.compiler.causality.typed import split_dim
from meshwright.compiler.causality.words import any_over, pack, unpack


@rule("aten.convolution")
def convolution(call: Call) -> Shadow:
    """Exact in reach, stride, dilation, padding and groups; a known zero of the kernel brings nothing."""
    value, kernel = call["input"], call["weight"]
    spatial = kernel.dim() - 2
    for d in range(spatial):
        reach = (kernel.shape[2 + d] - 1) * call["dilation"][d if len(call["dilation"]) > 1 else 0] + 1
        call.interpreter.notes.spans.add(reach)
    shadow, weights = call.settled(value), call.settled(kernel)
    ones = (~(weights.known & (kernel == 0))).float()
    deps = None
    if shadow.deps is not None:
        batched = shadow.deps if value.dim() == kernel.dim() else shadow.deps.unsqueeze(0)
        bits = unpack(batched)  # [rows, channels, *places, bits]
        count = bits.shape[-1]
        planes = bits.movedim(-1, 0).flatten(0, 1)
        made = torch.convolution(
            planes,
            ones,
            None,
            call["stride"],
            call["padding"],
            call["dilation"],
            call["transposed"],
            call["output_padding"],
            call["groups"],
        )
        deps = pack(split_dim((made > 0.5).float(), 0, (count, -1)).movedim(0, -1)).reshape(*call.out.shape, -1)
    if weights.deps is not None:
        union = any_over(weights.deps.reshape(-1, call.width), (0,))
        deps = union.expand(*call.out.shape, call.width) if deps is None else deps | union
    bias = call.get("bias")
    if bias is not None and call.settled(bias).deps is not None:
        union = any_over(call.settled(bias).deps, (0,))  # type: ignore[arg-type]  # just seen
        deps = union.expand(*call.out.shape, call.width) if deps is None else deps | union
    everything = bool(shadow.known.all()) and bool(weights.known.all()) and bias is None
    return Shadow(constant(call.out.shape, everything).known, deps)


@rule(
    *(f"aten.{name}" for name in ("avg_pool1d", "avg_pool2d", "avg_pool3d", "_adaptive_avg_pool2d", "col2im")),
    *(f"aten.{name}" for name in ("max_pool2d_with_indices", "max_pool3d_with_indices", "upsample_nearest1d")),
    *(f"aten.{name}" for name in ("upsample_nearest2d", "upsample_linear1d", "upsample_bilinear2d")),
    *(f"aten.{name}" for name in ("_upsample_nearest_exact1d", "adaptive_max_pool2d", "_adaptive_avg_pool3d")),
)
def pooled(call: Call) -> Any:
    """Ops of no negative weights, over the last dims: an element joins what has a weight in it."""
    (value,) = call.tensors()
    shadow = call.settled(value)
    outs = tensors_in(call.out)
    if shadow.deps is None:
        made = constant(outs[0].shape, bool(shadow.known.all()))
    else:
        bits = unpack(shadow.deps).movedim(-1, 0)
        rows = [_one(call, value, plane) for plane in bits]
        made = Shadow(constant(outs[0].shape, False).known, pack(torch.stack(rows, -1)))
    results = tuple(replace(made) for _ in outs)
    return results[0] if isinstance(call.out, torch.Tensor) else results


def _one(call: Call, value: torch.Tensor, plane: torch.Tensor) -> torch.Tensor:
    arguments = {name: plane if v is value else v for name, v in call.arguments.items()}
    made = call.func(**arguments)
    first: torch.Tensor = made if isinstance(made, torch.Tensor) else made[0]
    return (first > 1e-9).float()


@rule("aten.max_pool1d")
def pooled_line(call: Call) -> Any:
    """As the pooling of planes."""
    return pooled(call)
