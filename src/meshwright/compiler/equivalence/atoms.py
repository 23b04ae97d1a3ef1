"""The sizes of a step as unknowns: which dims, or parts of dims, of all its tensors are one and the same.

A dim is a product of *atoms*, major to minor. Where an op says that two dims are one, their atoms become one, split
where borders of the other lie within. An atom is *fixed* where the program depends on its very size.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence


class Atom:
    """A size. Those that turned out to be one are found by :func:`leaves`."""

    __slots__ = ("base", "fixed", "parent", "parts", "size")

    def __init__(self, size: int, fixed: bool = False) -> None:
        self.size = size
        self.fixed = fixed
        self.parent: Atom | None = None
        self.parts: tuple[Atom, Atom] | None = None
        self.base: tuple[Dim, int] | None = None
        """A dim, and by how much this is longer: a row of labels shifted by one."""


Dim = list[Atom]


def dim_of(size: int) -> Dim:
    """A dim of which nothing is known yet."""
    return [] if size == 1 else [Atom(size)]


def leaves(atoms: Iterable[Atom]) -> Dim:
    """The atoms as they are now, split and joined."""
    found: Dim = []
    for atom in atoms:
        while atom.parent is not None:
            atom = atom.parent
        found += leaves(atom.parts) if atom.parts is not None else [atom]
    return found


def fix(atoms: Iterable[Atom]) -> None:
    """The program depends on these sizes."""
    for atom in leaves(atoms):
        atom.fixed = True
        if atom.base is not None:
            base, atom.base = atom.base, None
            fix(base[0])


def longer(dim: Dim, by: int) -> Dim:
    """A dim that is always so much longer than another one (shorter, if less than zero)."""
    found = leaves(dim)
    if len(found) == 1 and found[0].base is not None:
        base, before = found[0].base
        return base if before + by == 0 else longer(base, before + by)
    made = Atom(product(found) + by)
    made.base = found, by
    if any(atom.fixed for atom in found):
        fix([made])
    return [made]


def product(atoms: Iterable[Atom]) -> int:
    return math.prod(a.size for a in leaves(atoms))


def unify(first: Sequence[Atom], second: Sequence[Atom]) -> None:
    """Both products are one dim. Raises ValueError if their sizes differ."""
    left, right = leaves(first), leaves(second)
    if product(left) != product(right):
        raise ValueError(f"dims of {product(left)} and {product(right)} elements are not one")
    while left and right:
        a, b = left[0], right[0]
        if a is b or a.size == b.size:
            _join(a, b)
            left, right = left[1:], right[1:]
        elif a.size % b.size == 0:
            left = [*_split(a, b.size), *left[1:]]
        elif b.size % a.size == 0:
            right = [*_split(b, a.size), *right[1:]]
        else:  # their borders cross: the sizes are as they are
            fix([*left, *right])
            return
        left, right = leaves(left), leaves(right)


def _join(a: Atom, b: Atom) -> None:
    if a.base is not None and b.base is None:
        a, b = b, a
    if a is not b:
        if a.fixed or b.fixed:
            fix([a, b])
        a.parent = b


def _split(atom: Atom, major: int) -> tuple[Atom, Atom]:
    if atom.base is not None:
        fix([atom])
    atom.parts = Atom(major, atom.fixed), Atom(atom.size // major, atom.fixed)
    return atom.parts
