"""The miniature of a plan: every axis stays and has two ranks or three, whatever it had; all else is as it was."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from meshwright.compiler.equivalence.atoms import Atom, Dim, leaves
from meshwright.compiler.equivalence.shrink import Shrunk, size_of
from meshwright.compiler.graph.program import StepProgram, Value
from meshwright.compiler.mesh import Mesh, Segment, Sharding, split
from meshwright.compiler.plan import PIPE, Hashes, ParameterPlan, Plan, pattern_expression

MOST = 16
"""Ranks of a miniature, at most."""


def small_mesh(mesh: Mesh) -> Mesh:
    """Axes of several ranks get two, the first of three ranks or an odd number of them three; beyond sixteen ranks in
    all the last axes get one."""
    sizes: list[tuple[str, int]] = []
    count = 1
    for name, size in mesh.axes:
        small = 1 if size == 1 else 3 if size % 2 and count * 3 <= MOST else 2
        small = small if count * small <= MOST else 1
        count *= small
        sizes.append((name, small))
    return Mesh(tuple(sizes))


def small_sharding(sharding: Sharding, dims: Sequence[Dim], new: Mapping[Atom, int], mesh: Mesh) -> Sharding:
    """A sharding over new sizes: every atom is cut by the axes that cut it, or, if it was cut with others, those."""
    made: list[tuple[Segment, ...]] = []
    for segments, dim in zip(sharding.dims, dims, strict=True):
        atoms = leaves(dim)
        parts = split(segments, tuple(a.size for a in atoms), mesh)
        if parts is None:  # the cut goes through a border of atoms: it is made along the whole dim
            axes = tuple(a for s in segments for a in s.axes)
            made.append((Segment(size_of(atoms, new), axes),))
            continue
        row = [
            Segment(size_of([atom], new), tuple(a for s in part for a in s.axes))
            for atom, part in zip(atoms, parts, strict=True)
        ]
        made.append(tuple(row) or (Segment(1),))
    return Sharding(tuple(made), sharding.partial).canonical()


def small_parameters(plan: Plan, program: StepProgram, shrunk: Shrunk) -> Iterator[ParameterPlan]:
    """What the plan says of each parameter of the miniature, one by one."""
    for parameter in program.parameters:
        names = (parameter.name, *parameter.aliases)
        entry = next((e for e in plan.parameters if any(map(pattern_expression(e.pattern).fullmatch, names))), None)
        dims = shrunk.sizes.values.get(Value("parameter", parameter.name))
        if entry is None or dims is None:
            continue

        def small(sharding: Sharding | None, dims: list[Dim] = dims) -> Sharding | None:
            return None if sharding is None else small_sharding(sharding, dims, shrunk.new, plan.mesh)

        compute = small(entry.compute)
        assert compute is not None
        yield ParameterPlan(parameter.name, compute, small(entry.rest), small(entry.gradient), small(entry.state))


def small_microbatches(plan: Plan) -> int:
    """Two, or for a pipeline twice as many as it has ranks, if there were so many."""
    wanted = 2 if plan.pipeline is None else 2 * small_mesh(plan.mesh).size(PIPE)
    return min(plan.microbatches, wanted)


def small_plan(plan: Plan, program: StepProgram, shrunk: Shrunk, first_blocks: tuple[str, ...]) -> Plan:
    """The plan of the miniature. ``program`` is the step that was shrunk, ``first_blocks`` those of its stages."""
    pipeline = plan.pipeline
    if pipeline is not None:
        pipeline = replace(pipeline, first_blocks=first_blocks, table="")
    return replace(
        plan,
        mesh=small_mesh(plan.mesh),
        microbatches=small_microbatches(plan),
        parameters=tuple(small_parameters(plan, program, shrunk)),
        pipeline=pipeline,
        hashes=Hashes(),
        predicted=None,
        reasons=(),
    )
