"""Short names of dtypes, as types are printed: ``f32``, ``bf16``, ``i64``."""

from __future__ import annotations

import torch

SHORT: dict[torch.dtype, str] = {
    torch.float64: "f64",
    torch.float32: "f32",
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.float8_e4m3fn: "f8e4m3fn",
    torch.float8_e5m2: "f8e5m2",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.int16: "i16",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.uint16: "u16",
    torch.uint32: "u32",
    torch.uint64: "u64",
    torch.bool: "bool",
    torch.complex64: "c64",
    torch.complex128: "c128",
}
PRECISIONS = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}
"""The dtypes of the names that a plan's ``precision`` uses."""
LONG: dict[str, torch.dtype] = {short: dtype for dtype, short in SHORT.items()}


def short_name(dtype: torch.dtype) -> str:
    """``torch.float32`` -> ``f32``."""
    return SHORT.get(dtype) or str(dtype).removeprefix("torch.")


def dtype_named(name: str) -> torch.dtype:
    """``f32`` -> ``torch.float32``. Raises KeyError."""
    found = LONG.get(name) or getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise KeyError(name)
    return found
