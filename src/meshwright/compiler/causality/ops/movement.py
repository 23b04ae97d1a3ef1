"""Ops that only move elements: told by running the op on the numbers of the elements."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from meshwright.compiler.causality.call import Call, tensors_in
from meshwright.compiler.causality.registry import rule
from meshwright.compiler.causality.shadow import Shadow, constant
from meshwright.compiler.causality.words import any_over, softened

_MOVES = """cat stack flip roll constant_pad_nd tril triu repeat im2col reflection_pad1d reflection_pad2d
replication_pad1d replication_pad2d slice_scatter select_scatter diagonal_scatter as_strided_scatter expand_copy
permute_copy view_copy slice_copy select_copy unfold_copy diag_embed pixel_shuffle pixel_unshuffle rot90
repeat_interleave.self_int unbind_copy split_copy split_with_sizes_copy transpose_copy t_copy squeeze_copy
unsqueeze_copy channel_shuffle tile narrow_copy block_diag alias_copy _reshape_copy diagonal_copy trace
resolve_conj resolve_neg _pad_circular lift lift_fresh_copy view_as_real_copy""".split()


@rule(*(f"aten.{name}" for name in _MOVES if name != "trace"))
def moved(call: Call) -> Any:
    """Each element of the result is one of those given, or a constant (which is then known)."""
    given = call.tensors()
    start = 1
    numbers: dict[int, Tensor] = {}
    for value in given:
        if id(value) not in numbers:
            count = torch.arange(start, start + value.numel(), dtype=torch.float64)
            numbers[id(value)] = count.reshape(value.shape)
            start += value.numel()
    arguments = {name: _numbered(value, numbers) for name, value in call.arguments.items()}
    if "value" in arguments and not isinstance(arguments["value"], Tensor | list):
        arguments["value"] = 0.0
    for name in ("dtype", "memory_format"):
        arguments.pop(name, None)
    positions = call.func(**arguments)
    flat = _flat(call, list({id(v): v for v in given}.values()))
    made = tuple(_picked(flat, places.round().long()) for places in tensors_in(positions))
    return made[0] if isinstance(call.out, Tensor) else made


@rule("aten._pack_padded_sequence", "aten._pad_packed_sequence")
def packed(call: Call) -> Any:
    """Rows by known lengths one position after another, and back."""
    value, others = call.tensors()
    lengths = call.settled(others)
    flat = _flat(call, [value])
    numbers = torch.arange(1, value.numel() + 1, dtype=torch.float64).reshape(value.shape)
    arguments = {name: numbers if v is value else v for name, v in call.arguments.items()}
    if "padding_value" in arguments:
        arguments["padding_value"] = 0.0
    first, _ = call.func(*arguments.values())
    made = _picked(flat, first.round().long())
    if lengths.deps is not None:
        union = softened(any_over(lengths.deps, (0,)))
        made = Shadow(made.known & False, call.words(made) | union)
        return made, Shadow(constant(call.out[1].shape, False).known, union.expand(*call.out[1].shape, -1))
    return made, constant(call.out[1].shape, bool(lengths.known.all()))


def _numbered(value: Any, numbers: dict[int, Tensor]) -> Any:
    if isinstance(value, Tensor):
        return numbers[id(value)]
    if isinstance(value, list | tuple):
        return [_numbered(one, numbers) for one in value]
    return value


def _flat(call: Call, given: list[Tensor]) -> Shadow:
    """All elements in one row, behind a constant."""
    shadows = [call.shadow(v) for v in given]
    known = torch.cat([torch.ones(1, dtype=torch.bool), *(s.known.reshape(-1) for s in shadows)])
    fields: dict[str, Tensor | None] = {}
    for name, dtype in (("item", torch.int32), ("rank", torch.int32), ("trait", torch.uint8)):
        if all(getattr(s, name) is None for s in shadows):
            fields[name] = None
            continue
        parts = [torch.zeros(1, dtype=dtype)]
        for shadow in shadows:
            value = getattr(shadow, name)
            parts.append(torch.zeros(shadow.known.numel(), dtype=dtype) if value is None else value.reshape(-1))
        fields[name] = torch.cat(parts)
    deps = None
    if any(s.deps is not None for s in shadows):
        words = [call.words(s).reshape(-1, call.width) for s in shadows]
        deps = torch.cat([torch.zeros((1, call.width), dtype=torch.int64), *words])
    return Shadow(known, deps, **fields)


def _picked(flat: Shadow, places: Tensor) -> Shadow:
    return flat.map(lambda x: x[places])
