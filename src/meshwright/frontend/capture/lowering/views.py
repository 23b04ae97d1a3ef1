"""Views are regroupings of elements, whatever strides the tensors had when the model was exported.

Our own ops (attention, say) may give a result other strides than the op that they stand for.
"""

from __future__ import annotations

import torch
from torch import Tensor

from meshwright.frontend.capture.lowering.site import Site, lowers

aten = torch.ops.aten


@lowers(aten.view.default, aten._unsafe_view.default)
def view(site: Site, x: Tensor, shape: list[int]) -> Tensor:
    return x.reshape(shape)
