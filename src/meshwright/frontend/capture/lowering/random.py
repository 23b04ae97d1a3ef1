"""Dropout becomes the counter-based one; its mask is a function of the step's key and the element's place."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from meshwright.frontend.capture.lowering.site import Site, lowers

aten = torch.ops.aten


@lowers(aten.dropout.default)
def dropout(site: Site, x: Tensor, p: float, train: bool) -> Tensor:
    if not train or p == 0:
        return x
    made: Tensor = torch.ops.meshwright.dropout(x, site.key, float(p), site.next_site(), [], [])
    return made


@lowers(aten.native_dropout.default)
def native_dropout(site: Site, x: Tensor, p: float, train: bool | None) -> tuple[Tensor, Any]:
    """Nothing but the op's own backward reads its mask, and that is not in an exported graph."""
    return dropout(site, x, p, train is not False), None
