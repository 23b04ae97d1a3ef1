"""Which dims of which parameters tensor parallelism cuts, found from the program itself.

Three kinds of logical axes are cut, in this order: the heads of attention, the inner axes of a product
of two weights (the hidden width of an MLP), and the vocabulary. Columns of one product and rows of the
next then share a cut, which leaves one owed sum per pair, as in Megatron-LM (Shoeybi et al. 2019).
An axis that some kernel needs whole (a norm, a head's channels) is never cut.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from meshwright.compiler.analysis.axes import Atom, infer_axes
from meshwright.compiler.diagnostics import error
from meshwright.compiler.graph.program import StepProgram
from meshwright.compiler.mesh import Mesh, Segment, Sharding
from meshwright.compiler.plan import ParameterPlan

VOCABULARY = 16
"""A table is cut over ``k`` ranks when it has at least ``16 k`` rows: fewer are not worth a collective."""


@dataclass(frozen=True)
class TensorCut:
    """The tensor axes (one, or two where key/value heads are fewer than ranks) and what they cut."""

    axes: tuple[tuple[str, int], ...]
    cuts: dict[Atom, tuple[str, ...]]
    dims: dict[str, list[list[Atom]]]
    """By parameter name the atoms of each dim."""

    def plans(self, mesh: Mesh, parameters: Mapping[str, str]) -> tuple[ParameterPlan, ...]:
        """One entry per kind of parameter: names that differ in block numbers alone share one. ``parameters``: by
        name, the one of the program that it is cut like."""
        exact = {name: self._sharding(like, mesh) for name, like in parameters.items() if like in self.dims}
        kinds: dict[str, list[str]] = {}
        for name in exact:
            kinds.setdefault(re.sub(r"(?<=\.)\d+(?=\.)", "*", name), []).append(name)
        plans = []
        for pattern, names in kinds.items():
            shardings = {exact[n] for n in names}
            if len(shardings) == 1:
                plans.append(ParameterPlan(pattern, shardings.pop()))
            else:
                plans.extend(ParameterPlan(n, exact[n]) for n in names)
        return tuple(p for p in plans if p.compute.axes)

    def _sharding(self, name: str, mesh: Mesh) -> Sharding:
        """An axis of the mesh cuts a tensor once: of a square weight between values that are added to each other, whose
        dims are one logical axis, the first dim that has it is cut, and the others are whole."""
        used: set[str] = set()

        def segment(atom: Atom) -> Segment:
            axes = self.cuts.get(atom, ())
            if used & set(axes):
                return Segment(atom.size)
            used.update(axes)
            return Segment(atom.size, axes)

        return Sharding(tuple(tuple(map(segment, atoms)) or (Segment(1),) for atoms in self.dims[name])).canonical(mesh)


def tensor_cut(program: StepProgram, degree: int, whole: Collection[str] = ()) -> TensorCut:
    """Find what ``degree`` ranks of tensor parallelism cut. ``whole`` leaves a group out: ``heads``, ``inner`` or
    ``vocabulary``. Raises E0306 when there is nothing to cut."""
    dims, uses = _uses(program)
    free = [a for a in uses if not a.roles & {"whole", "batch"}]
    attentions = [] if "heads" in whole else _attentions([a for a in free if "head" in a.roles], uses)
    mesh_axes = _mesh_axes(attentions, degree)
    every = tuple(name for name, _ in mesh_axes)
    cuts: dict[Atom, tuple[str, ...]] = {}
    for heads in attentions:
        cuts.update(_head_cuts(heads, mesh_axes, degree))
    taken = {name for a in cuts for name in uses[a]}
    inner = [a for a in _inner(free, uses) if a.size >= degree and "inner" not in whole]
    tables = [a for a in _tables(free) if a.size >= VOCABULARY * degree and "vocabulary" not in whole]
    for atom in sorted(inner, key=lambda a: -a.size) + sorted(tables, key=lambda a: -a.size):
        if not uses[atom] & taken:
            cuts[atom] = every
            taken |= uses[atom]
    if not cuts:
        raise error(
            "E0306",
            "tensor parallelism finds nothing to cut: no attention heads, no inner width of an MLP, no vocabulary",
            None,
            "use data parallelism (fsdp), or name the shardings in a plan file",
        )
    return TensorCut(mesh_axes, cuts, dims)


def cut_sizes(program: StepProgram) -> dict[str, tuple[int, ...]]:
    """What tensor parallelism may cut: the numbers of ``heads`` (key/value heads and the queries of each, if they
    differ), the ``inner`` widths, and the ``vocabulary``. Groups that the program does not have are absent."""
    _, uses = _uses(program)
    free = [a for a in uses if not a.roles & {"whole", "batch"}]
    attentions = _attentions([a for a in free if "head" in a.roles], uses)
    heads = {tuple(a.size for a in group) for group in attentions}
    taken = {name for group in attentions for a in group for name in uses[a]}
    inner = {a.size for a in _inner(free, uses) if not uses[a] & taken}
    tables = {a.size for a in _tables(free)}
    found = {"heads": min(heads, default=()), "inner": tuple(sorted(inner)), "vocabulary": tuple(sorted(tables))}
    return {name: sizes for name, sizes in found.items() if sizes}


def _uses(program: StepProgram) -> tuple[dict[str, list[list[Atom]]], dict[Atom, set[str]]]:
    """The logical axes of every parameter's dims, and by axis the parameters that have it."""
    axes = infer_axes(program.micro, program.batch_dims)
    dims = {v.name: axes.of(n) for v, n in program.micro.placeholders().items() if v.kind == "parameter"}
    uses: dict[Atom, set[str]] = {}
    for name, atoms_of_dims in dims.items():
        for atom in (a for atoms in atoms_of_dims for a in atoms):
            uses.setdefault(atom, set()).add(name)
    return dims, uses


def _inner(free: Iterable[Atom], uses: dict[Atom, set[str]]) -> list[Atom]:
    return [a for a in free if not a.roles and len(uses[a]) > 1]


def _tables(free: Iterable[Atom]) -> list[Atom]:
    return [a for a in free if a.roles & {"lookup", "logits"} and "head" not in a.roles]


def _attentions(heads: list[Atom], uses: dict[Atom, set[str]]) -> list[list[Atom]]:
    """The head axes of each attention: those of key/value heads first, then the queries that share one."""
    groups: list[list[Atom]] = []
    for atom in sorted(heads, key=lambda a: -len(uses[a])):
        found = next((g for g in groups if any(uses[a] & uses[atom] for a in g)), None)
        if found is None:
            groups.append([atom])
        else:
            found.append(atom)
    return groups


def _mesh_axes(attentions: list[list[Atom]], degree: int) -> tuple[tuple[str, int], ...]:
    """Fewer key/value heads than ranks: the axis is made of two, the first of which cuts those heads."""
    for heads in attentions:
        if len(heads) < 2 or heads[0].size == 1:
            continue
        groups, queries = heads[0].size, heads[1].size
        if groups % degree and degree % groups == 0 and queries % (degree // groups) == 0:
            return (("tensor", groups), ("group", degree // groups))
    return (("tensor", degree),)


def _head_cuts(heads: list[Atom], axes: tuple[tuple[str, int], ...], degree: int) -> dict[Atom, tuple[str, ...]]:
    every = tuple(name for name, _ in axes)
    if heads[0].size == 1 and len(heads) > 1:
        return {heads[1]: every}
    if len(axes) == 2 and len(heads) > 1 and heads[0].size % degree:
        return {heads[0]: every[:1], heads[1]: every[1:]}
    return {heads[0]: every}
