"""New sizes of a step's atoms: each at least twice the shards that it is cut into, and no two alike if it can be."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from meshwright.compiler.equivalence.atoms import Atom, leaves
from meshwright.compiler.equivalence.sizes import Sizes
from meshwright.compiler.graph.program import StepProgram, Value
from meshwright.compiler.mesh import Mesh, Sharding, split
from meshwright.compiler.plan import Plan

LEAST = 3
"""Sizes up to this stay: halves that are rotated, the q, k and v of one weight."""
LONG = 256
"""A dim from this size on may be what a weight is stored in shards along."""
SHORT = 5
"""What a sample is long, at least, so that there is something before and after every position."""
FACTORS = (3, 4, 5, 7, 8, 9, 11, 13)


def axes_of(sizes: Sizes, shardings: Mapping[Value, Iterable[Sharding]], mesh: Mesh) -> dict[Atom, set[str]]:
    """By atom: the axes of the mesh that cut it somewhere."""
    found: dict[Atom, set[str]] = {}
    for value, all_ in shardings.items():
        for sharding in all_:
            for segments, dim in zip(sharding.dims, sizes.values.get(value, ()), strict=False):
                atoms = leaves(dim)
                parts = split(segments, tuple(a.size for a in atoms), mesh)
                for atom, part in zip(atoms, parts or [segments, *[()] * (len(atoms) - 1)], strict=False):
                    found.setdefault(atom, set()).update(a for s in part for a in s.axes)
    return found


def new_sizes(
    program: StepProgram, sizes: Sizes, cuts: Mapping[Atom, set[str]], plan: Plan, small: Mesh, microbatches: int
) -> dict[Atom, int]:
    """The new size of every atom that may change. The batch has two samples for each shard of a microbatch."""
    old = plan.mesh
    stored = tuple(dict.fromkeys(plan.storage.parameters + plan.storage.gradients + plan.storage.state))
    found: dict[Atom, int] = {}
    for name, dim in program.batch_dims.items():
        if dim is not None and (value := Value("batch", name)) in sizes.values:
            for atom in leaves(sizes.values[value][dim]):
                if not atom.fixed:
                    found[atom] = 2 * microbatches * small.size(*plan.batch)
    rows = {
        a
        for name, dim in program.batch_dims.items()
        for d, other in enumerate(sizes.values.get(Value("batch", name), ()))
        if d != dim
        for a in leaves(other)
    }
    used = set(found.values())
    alike: dict[tuple[int, tuple[str, ...]], int] = {}
    for atom in _all(sizes):
        if atom.fixed or atom in found or atom.size <= LEAST or atom.base is not None:
            continue
        axes = tuple(sorted(a for a in cuts.get(atom, ()) if a in small.names))
        if not axes and atom.size % old.size(*stored) == 0 and atom.size >= LONG:
            axes = stored  # a weight is stored in shards along it
        if (atom.size, axes) not in alike:
            shards = small.size(*axes)
            divides = all(atom.size % old.size(a) == 0 for a in axes)
            factors = [k for k in FACTORS if k * shards >= SHORT] if atom in rows else FACTORS
            options = [shards * k + (0 if divides or shards == 1 else 1) for k in factors]
            alike[atom.size, axes] = next((n for n in options if n not in used), options[0])
            used.add(alike[atom.size, axes])
        if alike[atom.size, axes] < atom.size:
            found[atom] = alike[atom.size, axes]
    return found


def _all(sizes: Sizes) -> dict[Atom, None]:
    found: dict[Atom, None] = {}
    for node, dims in sizes.dims.items():
        for one in dims if isinstance(node.meta["val"], (list, tuple)) else [dims]:
            for dim in one or ():
                found |= dict.fromkeys(leaves(dim))
    return found
