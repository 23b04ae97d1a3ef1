"""New sizes of a step's atoms: each at least twice the shards that it is cut into, and no two alike if it can be."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from meshwright.compiler.equivalence.atoms import Atom, leaves
from meshwright.compiler.equivalence.sizes import Sizes
from meshwright.compiler.graph.program import StepProgram, Value
from meshwright.compiler.mesh import Mesh, Sharding, split

LEAST = 3
"""Sizes up to this stay: halves that are rotated, the q, k and v of one weight."""
FACTORS = (3, 4, 5, 7, 8, 9, 11, 13)


def axes_of(sizes: Sizes, shardings: Mapping[Value, Iterable[Sharding]], mesh: Mesh) -> dict[Atom, set[str]]:
    """By atom: the axes of the mesh that cut it somewhere."""
    found: dict[Atom, set[str]] = {}
    for value, all_ in shardings.items():
        for sharding in all_:
            for segments, dim in zip(sharding.dims, sizes.values.get(value, ()), strict=False):
                atoms = leaves(dim)
                parts = split(segments, tuple(a.size for a in atoms), mesh)
                for atom, part in zip(atoms, parts or [segments] * len(atoms), strict=True):
                    found.setdefault(atom, set()).update(a for s in part for a in s.axes)
    return found


def new_sizes(
    program: StepProgram, sizes: Sizes, cuts: Mapping[Atom, set[str]], old: Mesh, small: Mesh, microbatches: int
) -> dict[Atom, int]:
    """The new size of every atom that may change. The batch has two samples for each shard of a microbatch."""
    found: dict[Atom, int] = {}
    batch = [
        a
        for name, dim in program.batch_dims.items()
        if dim is not None and Value("batch", name) in sizes.values
        for a in leaves(sizes.values[Value("batch", name)][dim])
    ]
    for atom in dict.fromkeys(batch):
        shards = small.size(*(a for a in cuts.get(atom, ()) if a in small.names))
        if not atom.fixed:
            found[atom] = 2 * microbatches * shards
    used = set(found.values())
    every = dict.fromkeys(
        a
        for node, dims in sizes.dims.items()
        for one in (dims if isinstance(node.meta["val"], (list, tuple)) else [dims])
        for dim in one or ()
        for a in leaves(dim)
    )
    for atom in every:
        if atom.fixed or atom in found or atom.size <= LEAST:
            continue
        axes = sorted(cuts.get(atom, ()))
        shards = small.size(*(a for a in axes if a in small.names))
        divides = atom.size % old.size(*(a for a in axes if a in old.names)) == 0
        options = [shards * k + (0 if divides or shards == 1 else 1) for k in FACTORS]
        size = next((n for n in options if n not in used), options[0])
        if size < atom.size:
            found[atom] = size
            used.add(size)
    return found


def work(program: StepProgram) -> float:
    """The elements of a step's largest parameter, to tell whether it is small."""
    return max((math.prod(p.spec.shape) for p in program.parameters), default=0)
