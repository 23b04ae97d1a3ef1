"""The one op that propagation adds to a global graph: the same tensor, lying differently.

On one device it is the identity, so an annotated graph can be run and compared at any point.
Lowering replaces it by the collectives of its path (see ``mesh_paths``).
"""

from __future__ import annotations

from functools import lru_cache

from torch import Tensor, fx

from meshwright.compiler.mesh import Sharding, parse_sharding


def redistribute(x: Tensor, source: str, target: str) -> Tensor:
    """``x``, which lies as ``source``, lying as ``target``. Shardings are written as they print."""
    return x


def moves(node: fx.Node) -> tuple[fx.Node, Sharding, Sharding]:
    """The value that a ``redistribute`` node moves, from where, and whereto."""
    x, source, target = node.args
    assert isinstance(x, fx.Node) and isinstance(source, str) and isinstance(target, str)
    return x, _parsed(source), _parsed(target)


_parsed = lru_cache(maxsize=4096)(parse_sharding)
