"""Registration of Meshwright's ops: schema, kernel, fake kernel and gradient in one call each.

``constant`` marks, during capture alone, a value through which no gradient flows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

LIBRARY: Any = torch.library.Library("meshwright", "FRAGMENT")  # type: ignore[no-untyped-call]  # torch has no types here

Kernel = Callable[..., Any]
KERNELS: dict[str, Kernel] = {}
"""By name, without the namespace: how each op is written."""


def register(schema: str, kernel: Kernel, fake: Kernel) -> None:
    """Define the op ``schema`` with one kernel for every device and one for fake and meta tensors.

    The kernels must not return an input or a view of one, unless the schema says so: a functional op makes new tensors.
    """
    name = "meshwright::" + schema.partition("(")[0]
    KERNELS[schema.partition("(")[0]] = kernel
    LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    for device in ("CPU", "CUDA"):
        LIBRARY.impl(name, kernel, device)
    torch.library.register_fake(name, fake, lib=LIBRARY)


def differentiate(name: str, backward: Kernel, setup_context: Kernel) -> None:
    """Give the op ``name`` its gradient; ``backward`` calls registered ops, so that it traces."""
    torch.library.register_autograd(f"meshwright::{name}", backward, setup_context=setup_context, lib=LIBRARY)


register("constant(Tensor x) -> Tensor", lambda x: x.clone(), torch.empty_like)
