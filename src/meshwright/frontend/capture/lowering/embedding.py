"""Lookups in a table."""

from __future__ import annotations

import torch
from torch import Tensor

from meshwright.compiler.diagnostics import error
from meshwright.frontend.capture.lowering.site import Site, lowers

aten = torch.ops.aten


@lowers(aten.embedding.default)
def embedding(
    site: Site,
    weight: Tensor,
    index: Tensor,
    padding_idx: int = -1,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor:
    if scale_grad_by_freq:
        raise error(
            "E0257",
            "an embedding with scale_grad_by_freq counts its indices over the whole batch in backward",
            site.origin,
            "leave out scale_grad_by_freq",
        )
    made: Tensor = torch.ops.meshwright.embedding(weight, index, 0, padding_idx)
    return made
