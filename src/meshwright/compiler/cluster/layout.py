"""How the group of some mesh axes lies on nested units of devices: nodes, groups of nodes, the cluster.

The mesh is laid onto the devices row by row: rank r on device r, the last axis fastest.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from operator import mul

from meshwright.compiler.mesh import Mesh


@dataclass(frozen=True)
class Layout:
    """Of one group (the one that lies worst, where groups differ). Level 0 are the devices, level i + 1 the units
    that tier i connects."""

    members: int
    inside: tuple[int, ...]
    """By level: how many members the unit with the fewest has."""
    units: tuple[int, ...]
    """By level: over how many units the group spreads."""


@lru_cache(maxsize=65536)
def layout(sizes: tuple[int, ...], mesh: Mesh, axes: tuple[str, ...]) -> Layout:
    """The layout of the groups of ``axes``; ``sizes`` are those of the tiers, innermost first."""
    levels = tuple(accumulate((1, *sizes), mul))
    aligned = _aligned(levels, mesh, axes)
    if aligned is None:
        aligned = _counted(levels, mesh, axes)
    return aligned


def strides(mesh: Mesh) -> dict[str, tuple[int, int]]:
    """By axis: the distance in ranks of neighbours along it, and its size."""
    found, stride = {}, 1
    for name, size in reversed(mesh.axes):
        found[name] = (stride, size)
        stride *= size
    return found


def _aligned(levels: tuple[int, ...], mesh: Mesh, axes: tuple[str, ...]) -> Layout | None:
    """By products alone; None if some axis straddles the border of a unit."""
    steps = strides(mesh)
    members = mesh.size(*axes)
    inside = []
    for unit in levels:
        here = 1
        for axis in axes:
            stride, size = steps[axis]
            extent = stride * size
            if unit >= mesh.ranks or (extent <= unit and unit % extent == 0):
                here *= size
            elif stride >= unit and stride % unit == 0:
                continue
            elif unit % stride == 0 and extent % unit == 0:
                here *= unit // stride
            else:
                return None
        inside.append(here)
    return Layout(members, tuple(inside), tuple(members // here for here in inside))


def _counted(levels: tuple[int, ...], mesh: Mesh, axes: tuple[str, ...]) -> Layout:
    """By counting the members of every group in every unit."""
    members = mesh.size(*axes)
    counts: list[dict[int, Counter[int]]] = [{} for _ in levels]
    others = [axis for axis in mesh.names if axis not in axes]
    for rank in range(mesh.ranks):
        place = mesh.coordinates(rank)
        group = 0
        for axis in others:
            group = group * mesh.size(axis) + place[axis]
        for level, unit in enumerate(levels):
            counts[level].setdefault(group, Counter())[rank // unit] += 1
    inside = tuple(min(min(c.values()) for c in level.values()) for level in counts)
    units = tuple(max(len(c) for c in level.values()) for level in counts)
    return Layout(members, inside, units)
