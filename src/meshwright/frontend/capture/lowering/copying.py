"""What is left of writes into tensors once they are made functional."""

from __future__ import annotations

import torch
from torch import Tensor

from meshwright.frontend.capture.lowering.site import Site, lowers


@lowers(torch.ops.aten.copy.default)
def copy(site: Site, old: Tensor, new: Tensor, non_blocking: bool = False) -> Tensor:
    """All of ``old`` replaced: what was there gets no gradient. (The functional op has no derivative.)"""
    return new.to(old.dtype).expand(old.shape)
