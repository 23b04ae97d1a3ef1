"""Fake tensors: a shape, a dtype and strides without data. The one place that imports torch's fake mode here."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
from torch._subclasses.fake_tensor import FakeTensorMode


@cache
def fake_mode() -> FakeTensorMode:
    """The mode that graphs read from text share, so that their values may meet in one op."""
    return FakeTensorMode(allow_non_fake_inputs=True)


def fake_tensor(shape: Sequence[int], dtype: torch.dtype, device: str = "cpu") -> torch.Tensor:
    """A contiguous fake tensor."""
    with fake_mode():
        return torch.empty(tuple(shape), dtype=dtype, device=device)
