"""How the ranks' parts of a value become the whole value outside of a graph."""

from __future__ import annotations

from torch import Tensor

from meshwright.compiler.graph import collectives
from meshwright.compiler.mesh import Mesh, Sharding


def paid(part: Tensor, sharding: Sharding, devices: Mesh) -> Tensor:
    """A rank's part, which lies as the sharding says, with what it owes over axes of the device mesh paid. ``part`` is
    left as it is."""
    total = part
    for reduction in sorted({r for _, r in sharding.partial}):
        axes = tuple(axis for axis in devices.names if (axis, reduction) in sharding.partial)
        if axes:
            total = collectives.all_reduce(total.clone(), axes, reduction)
    return total
