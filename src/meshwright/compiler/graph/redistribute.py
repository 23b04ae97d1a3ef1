"""The one op that propagation adds to a global graph: the same tensor, lying differently.

On one device it is the identity, so an annotated graph can be run and compared at any point.
Lowering replaces it by the collectives of its path (see ``mesh_paths``).
"""

from __future__ import annotations

from torch import Tensor

from meshwright.compiler.mesh import Sharding


def redistribute(x: Tensor, source: Sharding, target: Sharding) -> Tensor:
    """``x``, which lies as ``source``, lying as ``target``."""
    return x
