"""What parameters, gradients and optimizer state come to on a rank, in a layout of any bytes per element."""

from __future__ import annotations

import math
from collections.abc import Mapping

from meshwright.compiler.analysis.held import copies_of
from meshwright.compiler.graph.rank_program import Layout
from meshwright.compiler.mesh import Mesh, Sharding

MIXED_PRECISION = (2, 2, 12)
"""Bytes of a weight, of its gradient and of its optimizer state where 16-bit weights have a 32-bit copy and two moments
(Rajbhandari et al. 2020: "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models")."""


def model_state_bytes(
    layouts: Mapping[str, Layout],
    mesh: Mesh,
    bytes_each: tuple[int, int, int] = MIXED_PRECISION,
    repeats: Mapping[str, int] | None = None,
) -> int:
    """Bytes on every rank, padding included, with the given bytes for each element of weight, gradient and state.

    ``repeats``: of a folded program, how many equal blocks each block stands for.
    """
    total = 0
    for name, lies in layouts.items():
        parts = zip((lies.rest, lies.gradient, lies.state), bytes_each, strict=True)
        total += copies_of(name, repeats or {}) * sum(size * _elements(sharding, mesh) for sharding, size in parts)
    return total


def _elements(sharding: Sharding, mesh: Mesh) -> int:
    return math.prod(sharding.local_shape(mesh))
