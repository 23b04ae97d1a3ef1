"""Products of rows that are sorted by group, each group with its own weights."""

from __future__ import annotations

import torch
from torch import Tensor

from meshwright.frontend.capture.lowering.site import Site, lowers


@lowers("transformers.grouped_mm_fallback.default")
def grouped_mm(site: Site, x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """The form that ``transformers`` has for traces."""
    made: Tensor = torch.ops.meshwright.grouped_mm(x, weight, ends)
    return made
