"""Norms: over features, over groups of channels, over the batch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from meshwright.compiler.causality.call import Call, tensors_in
from meshwright.compiler.causality.ops.reduce import joined_over, squeezed
from meshwright.compiler.causality.registry import rule
from meshwright.compiler.causality.shadow import Shadow, constant
from meshwright.compiler.causality.words import any_over


@rule("aten.native_layer_norm", "aten._fused_rms_norm", "aten.layer_norm", "aten.rms_norm")
def layer_norm(call: Call) -> Any:
    """Each row of the normalized dims by itself."""
    value = call["input"]
    rank = len(call["normalized_shape"])
    dims = list(range(value.dim() - rank, value.dim()))
    made = _scaled(call, joined_over(call, value, dims))
    outs = tensors_in(call.out)
    results = [made.expand(outs[0].shape)]
    for out in outs[1:]:
        results.append(squeezed(made, dims, out, call.width) if out.numel() == made.known.numel() else _all(call, out))
    return results[0] if isinstance(call.out, Tensor) else tuple(results)


def _scaled(call: Call, made: Shadow) -> Shadow:
    """With what the scale and the shift depend on, for a norm whose weights are computed."""
    for name in ("weight", "bias"):
        value = call.get(name)
        if isinstance(value, Tensor):
            shadow = call.settled(value)
            made = replace(made, known=made.known & shadow.known.all())
            if shadow.deps is not None:
                union = any_over(shadow.deps.reshape(-1, call.width), (0,))
                made = replace(made, deps=call.words(made) | union)
    return made


def _all(call: Call, out: Tensor) -> Shadow:
    """The union of all that the call was given."""
    union = torch.zeros(call.width, dtype=torch.int64)
    for value in call.tensors():
        shadow = call.settled(value)
        if shadow.deps is not None:
            union = union | any_over(shadow.deps.reshape(-1, call.width), (0,))
    return Shadow(constant(out.shape, False).known, union.expand(*out.shape, call.width))


@rule("aten.native_group_norm")
def group_norm(call: Call) -> Any:
    """Each sample's groups of channels, with all places."""
    value = call["input"]
    rows, groups = call["N"], call["group"]
    shadow = call.settled(value)
    deps, known = shadow.deps, shadow.known.reshape(rows, groups, -1).all(-1)
    if deps is not None:
        deps = any_over(deps.reshape(rows, groups, -1, call.width), (2,))
    small = Shadow(known, deps)
    per = value.numel() // max(rows * groups, 1)
    wide = small.map(
        lambda x: x.unsqueeze(-1).expand(rows, groups, per).reshape(value.shape),
        lambda x: x.unsqueeze(2).expand(rows, groups, per, call.width).reshape(*value.shape, call.width),
    )
    return _scaled(call, wide), small, small


@rule(
    "aten.native_batch_norm",
    "aten._native_batch_norm_legit",
    "aten._native_batch_norm_legit_no_training",
    "aten._native_batch_norm_legit_functional",
    "aten._batch_norm_impl_index",
    "aten.cudnn_batch_norm",
    "aten._batch_norm_with_update_functional",
    "aten._batch_norm_with_update",
    "aten._batch_norm_no_update",
)
def batch_norm(call: Call) -> Any:
    """In training each channel over all else; otherwise place by place."""
    value = call["input"]
    training = call.get("training", "no_training" not in call.name and "no_update" not in call.name)
    dims = [d for d in range(value.dim()) if d != 1]
    shadow = call.settled(value)
    made = joined_over(call, value, dims).expand(value.shape) if training else Shadow(shadow.known & False, shadow.deps)
    made = replace(made, known=made.known & False)
    outs = tensors_in(call.out)
    results = [made]
    for out in outs[1:]:
        results.append(_all(call, out) if training else constant(out.shape, False))
    return tuple(results)
